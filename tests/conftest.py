"""Small fakes that double as the definition of the interfaces: a tiny random model, its tokenizer, scripted scenarios."""
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OFFICIAL = ROOT.parent / "shared" / "data"             # the official files; tests that need them skip without

import sft  # noqa: E402
from rollout import ChatTokens  # noqa: E402
from simulator import load_scenarios  # noqa: E402

torch.set_num_threads(1)
# the same examples in every run, and none fails because the machine is slow
settings.register_profile("calm", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("calm")


@pytest.fixture(scope="session")
def scenarios():
    return load_scenarios(ROOT / "prompts" / "en" / "valid.jsonl")


@pytest.fixture(scope="session")
def tokenizer():
    return sft.build_tokenizer(sft.corpus_texts(load_scenarios(ROOT / "prompts" / "en" / "train.jsonl")))


@pytest.fixture(scope="session")
def chat(tokenizer):
    return ChatTokens(tokenizer)


@pytest.fixture
def model(tokenizer):
    """A random Qwen2 of 2 layers, the same in every test."""
    torch.manual_seed(0)
    return sft.build_model(tokenizer, hidden=32, layers=2).eval()


@pytest.fixture(scope="session")
def policy(tokenizer, tmp_path_factory):
    """The folder of a saved random model."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    sft.build_model(tokenizer, hidden=32, layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def official():
    if not OFFICIAL.exists():
        pytest.skip("the official files (../shared/data) are not here")
    return OFFICIAL
