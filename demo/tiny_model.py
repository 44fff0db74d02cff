"""A Llama with random weights and a tokenizer of its own, made in seconds and without a download.

The model says nonsense at the cost of a few hundred microseconds a token, which is what a latency
demonstration needs: everything around the model is real vLLM. The same recipe always gives the
same files; a directory is named by the hash of its recipe, so a changed recipe makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

RECIPE: Final[dict[str, Any]] = {
    "version": 1,
    "seed": 20,
    "max_vocab": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,  # the smallest that all of vLLM's CPU attention kernels take
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "chat_template": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
}
_TEXT: Final = (
    "request token batch queue prefill decode latency schedule engine kernel cache block worker server "
    "stream client trace span layer model memory compute network step wait share cause phase tail median "
    "the a of to "
    "in and is for with under over from into what where when why how slow fast long short first last next"
)
WORDS: Final = tuple(_TEXT.split())


def recipe_hash() -> str:
    """Twelve hex digits that name the recipe and the words that the tokenizer learns from."""
    text = json.dumps([RECIPE, WORDS], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ensure(work_dir: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The model's directory under ``work_dir``, made if it is not there yet.

    ``progress`` is told in a few words what is being done. Raises ``ImportError`` without torch,
    transformers and tokenizers (they come with vLLM), ``OSError`` when it cannot write.
    """
    target = work_dir / f"tiny-llama-{recipe_hash()}"
    if (target / "config.json").is_file():
        return target
    work_dir.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=work_dir))
    try:
        progress("training the tokenizer")
        vocab_size = make_tokenizer(making)
        progress("drawing the weights")
        make_weights(making, vocab_size)
        try:
            making.rename(target)  # all or nothing: an interrupted run leaves no half model
        except OSError:
            if not (target / "config.json").is_file():  # else another demo was faster
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def make_tokenizer(directory: Path) -> int:
    """Train a byte-level BPE on :data:`WORDS`, save it with the chat template, return its size."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=RECIPE["max_vocab"],
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = RECIPE["chat_template"]
    fast.save_pretrained(directory)
    return len(fast)


def make_weights(directory: Path, vocab_size: int) -> None:
    """Draw the weights from the recipe's seed and save them, leaving torch's own seed alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    sizes = {
        name: value for name, value in RECIPE.items() if name.endswith(("_size", "_heads", "_layers", "_dim"))
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=vocab_size,  # every id that the model can say has a text
        max_position_embeddings=RECIPE["max_position_embeddings"],
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE["seed"])
        model = LlamaForCausalLM(config).to(getattr(torch, RECIPE["dtype"]))
    model.save_pretrained(directory)
