"""jinja2 as transformers sets it up for chat templates, through which contents can be traced."""

import json
from datetime import datetime

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_prep.errors import UserError
from dflash_prep.traced import Traced, joined, origins, parts_of, traced

GENERATION = "generation"  # owns what stands between generation tags; a message's parts belong to its number
PROMPTING = "add_generation_prompt"
DICT_NAMES, LOOP_NAMES = frozenset(dir(dict)), frozenset({"first", "last", "index", "index0", "length"})


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as transformers sets it up, in which traced strings stay traced."""

    has_tags = False

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.concat = joined
        self.code_generator_class = TracingGenerator

    def getattr(self, obj: object, attribute: str) -> object:
        """The same as in any sandbox; what templates ask for most is known to be safe, and asking is half of rendering."""
        if type(obj) is dict and attribute not in DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class Generation(Extension):
    """The block {% generation %} that transformers adds to jinja2 around what the assistant says."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Hand the block's text to `spoken`."""
        line = next(parser.stream).lineno
        self.environment.has_tags = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("spoken"), [], [], body).set_lineno(line)

    def spoken(self, caller: Macro) -> str:
        """The block's text, traced to the tags."""
        text = caller()
        return Traced(text, (*parts_of(text), (0, len(text), (GENERATION, ""))))


class TracingGenerator(CodeGenerator):
    """jinja2's compiler; the operator ~ joins as the rest of a template does."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


def compiled(template: str, name: str) -> Template:
    """A template as transformers compiles it; `name` is the tokenizer's, for the error."""
    try:
        return TracingEnvironment().from_string(template)
    except Exception as fault:  # jinja2's own, and Python's where blocks are nested too deeply
        raise UserError(f"{name}: the chat template does not compile: {fault}") from None


def is_constant(environment: TracingEnvironment, source: str) -> bool:
    """Whether a template writes the same generation prompt after any conversation, as far as its source tells.

    It does if what stands under a condition on `add_generation_prompt` names only arguments of the template: nothing that
    the template sets itself, and no messages.
    """
    tree = environment.parse(source)
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")} | {"messages", "tools"}
    own |= {macro.name for macro in tree.find_all(nodes.Macro)}
    conditions = [node for node in tree.find_all(nodes.If) if PROMPTING in names_in(nodes.Output([node.test]))]
    asked = sum(names_in(nodes.Output([node.test])).count(PROMPTING) for node in conditions)
    inside = {name for node in conditions for name in names_in(node)}
    return asked == names_in(tree).count(PROMPTING) and not inside & own


def names_in(node: nodes.Node) -> list[str]:
    """The names that stand below a node."""
    return [name.name for name in node.find_all(nodes.Name)]


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The templates' `tojson`: jinja2's own would escape HTML. What one message says stays traced to it."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    found = origins(value)
    return traced(text, *min(found)) if len({owner for owner, _ in found}) == 1 else text


def refuse(message: str):
    """The templates' `raise_exception`."""
    raise TemplateError(message)
