"""The tiny model is made of nothing, the same each time, and loads as any other model."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratoscope.demo import tiny_model
from stratoscope.demo.scenario import SCENARIOS
from stratoscope.demo.server import CPU_BLOCK_TOKENS
from stratoscope.demo.workload import Kind, ask

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure(tmp_path_factory.mktemp("model"))


def test_a_second_making_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    again = tiny_model.ensure(tmp_path)
    names = sorted(path.name for path in model_dir.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert "model.safetensors" in names and "tokenizer.json" in names
    for name in names:
        assert (model_dir / name).read_bytes() == (again / name).read_bytes(), name


def test_it_is_made_once_and_leaves_no_scraps(model_dir: Path) -> None:
    before = (model_dir / "model.safetensors").stat().st_mtime_ns
    told: list[str] = []
    assert tiny_model.ensure(model_dir.parent, told.append) == model_dir
    assert told == [] and (model_dir / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in model_dir.parent.iterdir()] == [model_dir.name]
    assert tiny_model.recipe_hash() in model_dir.name


def test_it_loads_and_generates(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "why slow"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<user>why slow\n<assistant>"
    tokens = tokenizer(chat, return_tensors="pt")
    out = model.generate(**tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert out.shape == (1, tokens["input_ids"].shape[1] + 5)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_prompt_of_a_scenario_fits_its_server(model_dir: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    scenario = SCENARIOS[name]
    blocks = scenario.server.kv_blocks
    room = min(scenario.server.max_model_len, blocks * CPU_BLOCK_TOKENS if blocks else 1 << 30)
    kinds = set()
    for index in range(scenario.requests):
        a = ask(scenario.mix, "m", 0, index)
        kinds.add(a.kind)
        text = a.body.get("prompt") or a.body["messages"][0]["content"]
        assert len(tokenizer.encode(text)) + 16 + a.body["max_tokens"] <= room
    assert kinds == {kind for kind in Kind if scenario.mix.weights.get(kind)}
