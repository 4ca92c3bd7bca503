"""What every test may ask for: the default model's path."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: a pool larger than its core spins everybody to a halt.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests never look beyond this machine for a model: `make test` has fetched it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor do they ask a proxy for their own servers, where this machine has one for the world.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"
# Without a GPU, Triton's kernels run in its interpreter. Its own library is made for one or the other when it is first
# imported, whoever does that, so it is chosen here. (No torch yet: it would start its threads.)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
from hypothesis import settings

# The same examples at every run, so that a change is judged by what it changes. `pytest --hypothesis-profile explore`
# draws others; what that finds becomes an `@example` or a test of its own.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("fixed")

DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file in the local cache. Missing is a failure, not a skip: a green run has seen it."""
    home = Path(os.environ.get("TANDEM_HOME", Path.home() / ".cache" / "tandem"))
    path = home / "models" / DEFAULT_MODEL_FILE
    if not path.is_file():
        pytest.fail(f"{DEFAULT_MODEL_FILE} is not in the model cache: run `make model`")
    return path
