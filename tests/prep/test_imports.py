"""The off-line half stands alone: no torch, no transformers, nothing of the trainer."""

import json
import pkgutil
import subprocess
import sys

import pytest

import dflash_prep

MODULES = sorted(module.name for module in pkgutil.walk_packages(dflash_prep.__path__, "dflash_prep."))


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after some code."""
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_no_module_imports_torch_transformers_or_the_trainer():
    assert {"dflash_prep.cli", "dflash_prep.plan", "dflash_prep.store"} <= set(MODULES)
    loaded = loaded_after("\n".join(f"import {module}" for module in MODULES))
    assert set(MODULES) <= loaded
    assert not {name.split(".")[0] for name in loaded} & {"torch", "transformers", "dflash_trainer"}


@pytest.mark.parametrize("module", ["dflash_prep.cli", "dflash_prep.console", "dflash_prep.errors"])
def test_help_waits_for_no_library(module):
    heavy = {"numpy", "pyarrow", "polars", "tokenizers", "jinja2", "zstandard", "huggingface_hub"}
    assert not {name.split(".")[0] for name in loaded_after(f"import {module}")} & heavy


def test_planning_and_proving_load_no_tokenizer():
    loaded = loaded_after("import dflash_prep.plan, dflash_prep.verify")
    assert not {name.split(".")[0] for name in loaded} & {"tokenizers", "jinja2", "huggingface_hub"}
