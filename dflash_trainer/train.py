"""A training run: open the plan, its store and the target, then take the plan's steps one by one."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_prep.tokenizer import load_tokenizer
from dflash_prep.verify import open_stores
from dflash_trainer.cached_target import cache_key, cached
from dflash_trainer.checkpoint import checkpoint_path, draft_directory, load_checkpoint, load_draft, newest_checkpoint
from dflash_trainer.config import DraftConfig, derive_config, read_overrides
from dflash_trainer.draft import DraftModel
from dflash_trainer.fidelity import settle_attention
from dflash_trainer.history import checkpoints
from dflash_trainer.identity import plan_identity
from dflash_trainer.isolation import check_isolation
from dflash_trainer.launch import Ranks, decide_together, join, launch, under_torchrun, world_size
from dflash_trainer.loop import Run, take_steps
from dflash_trainer.mask_token import choose_mask_token
from dflash_trainer.objective import SHARES
from dflash_trainer.rehearse import rehearse
from dflash_trainer.shapes import Shapes, shapes_for
from dflash_trainer.sharding import place
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.stop import StopRequest
from dflash_trainer.target import FrozenTarget, load_target, target_fingerprint
from dflash_trainer.wandb_log import check_wandb


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the user asked for; see `dflash-train --help`."""

    manifest_dir: Path = Path("data/manifests")
    data: tuple[Path, ...] = ()
    target: str | None = None
    output: Path | None = None
    draft_config: Path | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    max_steps: int | None = None
    save_every: int = 500
    keep: int = 3
    max_bad_steps: int = 5
    eval_every: int | None = None
    init_from: Path | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    wandb: bool = False
    resume: str | None = None
    target_dtype: torch.dtype = torch.float32
    shard_target: bool = False
    hidden_cache: Path | None = None
    recipe: Recipe


def start(options: TrainOptions, nproc_per_node: int | None) -> None:
    """Check the input, then train on as many workers as there are."""
    workers = world_size(nproc_per_node)
    if not under_torchrun():  # there rank 0 places the run for all, once they have joined
        options = place_run(options)
    check_inputs(options, workers)
    launch(run_worker, (options,), workers)


def place_run(options: TrainOptions) -> TrainOptions:
    """Settle the run's directory and the checkpoint that it goes on from, if any; a placed run stays where it is."""
    output, resume = options.output, options.resume
    if resume == "auto":
        output = output or newest_run(Path("runs"))
        resume = newest_checkpoint(output) if output else None
    elif resume is not None:
        resume = find_checkpoint(Path(resume))
        output = output or run_of(resume)
    elif output is not None and checkpoints(output):
        raise UserError(f"{output}: holds a run; go on with --resume auto or choose another with -o")
    output = output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if resume and checkpoints(output) and resume.resolve().parent != checkpoint_path(output.resolve(), 0).parent:
        raise UserError(f"{output}: holds another run than the one of {resume}; choose another with -o")
    return replace(options, output=output, resume=str(resume) if resume else None)


def newest_run(runs: Path) -> Path | None:
    """The run whose newest checkpoint was written last."""
    found = [(there[-1].stat().st_mtime_ns, run) for run in runs.glob("*") if (there := checkpoints(run))]
    return max(found)[1] if found else None


def find_checkpoint(named: Path) -> Path:
    """The checkpoint that `--resume` names, itself or by its run."""
    found = named if (named / "trainer.json").is_file() else newest_checkpoint(named)
    if found is None:
        raise UserError(f"{named}: no checkpoint here; name a run or a checkpoint of one")
    return found


def run_of(checkpoint: Path) -> Path:
    """The run that a checkpoint lies in."""
    run = checkpoint.resolve().parent.parent
    if checkpoint_path(run, 0).parent != checkpoint.resolve().parent:
        raise UserError(f"{checkpoint}: a checkpoint outside its run; name the run's directory to write to with -o")
    return run


def check_inputs(options: TrainOptions, workers: int) -> tuple[Plan, Stores]:
    """Everything that can be refused before a worker starts."""
    if options.wandb:
        check_wandb()
    if options.hidden_cache and options.recipe.loss != "ce":
        raise UserError(
            f"--hidden-cache keeps tapped features only, and --loss {options.recipe.loss} needs the target's last states "
            "too; leave one of them out"
        )
    plan = Plan(options.manifest_dir)
    store = open_stores(plan, options.data)
    if plan["slots"] % workers:
        raise UserError(
            f"{plan.path}: its steps have {plan['slots']} slots, which {workers} workers do not divide; "
            f"use another --nproc-per-node or plan with --slots"
        )
    tokenizer = load_tokenizer(options.target)
    if tokenizer.fingerprint != store.manifest["tokenizer"]["fingerprint"]:
        raise UserError(
            f"{store.path}: was tokenized with {store.manifest['tokenizer']['name']}, not with the tokenizer of the "
            f"target {tokenizer.name}; tokenize it with --tokenizer {options.target or 'left out'}"
        )
    overrides_of(options)
    if options.eval_every and not plan["holdout_set"]:
        raise UserError(f"{plan.path}: has no hold-out to validate on; plan with --holdout, or leave --eval-every out")
    return plan, store


def overrides_of(options: TrainOptions) -> dict:
    """What the draft's configuration is to be: from its file, or that of the draft that training starts from."""
    if options.init_from is None:
        return read_overrides(options.draft_config)
    if options.draft_config is not None:
        raise UserError("--init-from and --draft-config are both given: the draft has its own; leave one of them out")
    return asdict(DraftConfig.load(draft_directory(options.init_from)))


def run_worker(options: TrainOptions) -> None:
    """One worker's whole run."""
    with StopRequest() as stop:
        ranks = join()
        try:
            with ExitStack() as held:
                options = decide_together(lambda: claim_run(options, held), ranks)
                stopped = train(options, ranks, stop)
            if ranks.leads:
                how = "done" if stopped is None else f"stopped after step {stopped}; go on with --resume auto"
                print(f"{options.output}: {how}", flush=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def claim_run(options: TrainOptions, held: ExitStack) -> TrainOptions:
    """Place a run and keep every other process out of its directory for as long as `held` is open."""
    options = place_run(options)
    held.enter_context(lock_run(options.output))
    options = place_run(options)  # once more: now nobody else can write there
    print(
        f"{options.output}: goes on from {options.resume}" if options.resume else f"{options.output}: starts afresh",
        flush=True,
    )
    return options


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold a run's directory; the system lets go of the lock however the process ends."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run}: another process trains here; wait for it, or choose another with -o") from None
        except OSError as fault:
            raise UserError(f"{run}: cannot be locked ({fault.strerror}); choose another file system with -o") from None
        yield


def train(options: TrainOptions, ranks: Ranks, stop: StopRequest) -> int | None:
    """Train from the first step, or from a checkpoint's, to the plan's end or to `--max-steps`.

    Returns the number of steps after which the run stopped before that because it was asked to, otherwise None.
    """
    plan, store = check_inputs(options, ranks.world_size)
    model = load_target(options.target, options.target_dtype, torch.device("cpu"))  # its place is settled once it is cut
    config = draft_config(options, model, plan, store)
    identity = run_identity(options, model, plan, store)
    sharded = shards(options, ranks)
    whole = SHARES[options.recipe.loss] > 0
    if whole:
        check_teacher(model.config.get_text_config(), options)
    width = len(config.target_layer_ids) * config.hidden_size
    key = (
        cache_key(model, config.target_layer_ids, options.target_dtype, store)
        if options.hidden_cache and ranks.leads
        else {}
    )
    placed = partial(place, ranks=ranks, sharded=sharded)
    target = FrozenTarget(model, config.target_layer_ids, options.recipe.dtype, placed, whole)
    shapes = shapes_for(plan, ranks.device, options.compile, (target.windows, frozenset(config.windows)))
    prove(target, len(model.get_input_embeddings().weight), options, plan, ranks, shapes)
    draft = initial_draft(options, config, plan["seed"]).to(ranks.device)
    draft.checkpoint_activations = options.checkpoint_activations
    if options.compile:
        draft.compile_layers()
        if plan["strategy"] == "packed":  # padded layouts have as many shapes as micro-batches
            target.compile()
    stepper = Stepper(draft, target, options.recipe, plan.total_steps)
    first = resume(options, ranks, plan, stepper, identity) if options.resume else 0
    asked = options.max_steps if options.max_steps is not None else plan.total_steps
    last = max(first, min(plan.total_steps, asked))  # what was trained already stays trained
    if first < last:
        rehearse(plan, store, stepper, ranks, shapes)
    run = Run(options, ranks, plan, store, stepper, identity, shapes)
    if options.hidden_cache is None:
        return take_steps(run, first, last, stop)
    width = len(config.target_layer_ids) * config.hidden_size
    with cached(target, options.hidden_cache, key, plan, store, width, ranks, options.recipe.dtype) as cache:
        stepper.target = cache
        return take_steps(replace(run, cache=cache), first, last, stop)


def prove(
    target: FrozenTarget, vocabulary: int, options: TrainOptions, plan: Plan, ranks: Ranks, shapes: Shapes | None
) -> None:
    """Prove that the target's taps are transformers' own, and in packed plans those of each sample alone."""
    packed, name = plan["strategy"] == "packed", options.target or "the default target"
    told = settle_attention(target, vocabulary, options.target_dtype, ranks.device, name, packed=packed, shapes=shapes)
    if told and ranks.leads:
        print(told, flush=True)
    if packed:
        check_isolation(target, vocabulary, options.target_dtype, ranks.device, name, shapes)


def check_teacher(config, options: TrainOptions) -> None:
    """Refuse to distil from a target whose logits are more than its LM head's products, and a cap on those."""
    for name in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(
                f"{options.target}: scales its logits ({name} {getattr(config, name)}), which --loss "
                f"{options.recipe.loss} does not compute; train with --loss ce"
            )


def shards(options: TrainOptions, ranks: Ranks) -> bool:
    """Whether the target is spread over the ranks. One worker goes on without: a run's command is the same on any number."""
    if options.shard_target and ranks.world_size == 1:
        print("--shard-target: there is one worker, which holds the whole target", flush=True)
    return options.shard_target and ranks.world_size > 1


def resume(options: TrainOptions, ranks: Ranks, plan: Plan, stepper: Stepper, identity: dict) -> int:
    """Restore what the checkpoint holds; returns the step that it goes on with."""
    state = load_checkpoint(Path(options.resume), stepper.draft, stepper.optimizer, identity)
    stepper.bad_steps, stepper.bad_in_a_row = state["bad_steps"], state["bad_in_a_row"]
    if ranks.leads and state["plan_fingerprint"] != plan["fingerprint"]:
        print(
            f"{plan.path}: {len(plan['epochs'])} epochs that begin with the run's {len(state['plan_epochs'])}; "
            f"the learning rate now spans {plan.total_steps} steps instead of {state['total_steps']}",
            flush=True,
        )
    began, now = state.get("target_dtype"), str(options.target_dtype).removeprefix("torch.")
    if ranks.leads and began not in (None, now):
        print(f"the target runs in {now} from step {state['step']} on; it ran in {began} before", flush=True)
    cached_before, cached_now = state.get("hidden_cache"), options.hidden_cache is not None
    if ranks.leads and cached_before not in (None, cached_now):
        how = "pass through bfloat16 and a cache" if cached_now else "come from the target, past any cache,"
        print(f"features {how} from step {state['step']} on; they did not before", flush=True)
    return state["step"]


def initial_draft(options: TrainOptions, config: DraftConfig, seed: int) -> DraftModel:
    """The draft before its first step: random, or one that is there already."""
    draft = DraftModel(config).initialise(seed)
    if options.init_from is not None:
        draft.load_state_dict(load_draft(options.init_from, torch.float32).state_dict())
    return draft


def run_identity(options: TrainOptions, model, plan: Plan, store: Stores) -> dict:
    """What a run has to go on with. How the target is computed (its dtype, its shards) may change, as --dtype may."""
    recipe = options.recipe
    return {
        **plan_identity(plan),
        "store_fingerprint": store.fingerprint,
        "target_fingerprint": target_fingerprint(model),
        "recipe": {"lr": recipe.learning_rate, "warmup": recipe.warmup, "clip": recipe.clip, "loss": recipe.loss},
    }


def draft_config(options: TrainOptions, model, plan: Plan, store: Stores) -> DraftConfig:
    """The draft's configuration for this target, plan and store."""
    overrides = overrides_of(options)
    rows = model.get_input_embeddings().weight.shape[0]
    named = overrides.pop("mask_token_id", None)
    requested = options.mask_token_id if options.mask_token_id is not None else named
    return derive_config(
        model.config.get_text_config(),
        block_size=plan["block_size"],
        mask_token_id=choose_mask_token(load_tokenizer(options.target), store, rows, requested),
        overrides=overrides,
        taps=options.taps,
    )
