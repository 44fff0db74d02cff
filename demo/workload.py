"""What the load driver asks for: kinds of request, mixed by weight, the same for the same seed.

Prompts are words drawn at random, so no two share a prefix beyond the first few words: the prefix
cache does not make the load vanish. Lengths are in words; with the tiny model's tokenizer a word
is about one and a quarter tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stratoscope.demo.tiny_model import WORDS

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


class Kind(StrEnum):
    """The kinds of request in a mix."""

    CHAT = "chat"  # short prompt, streamed
    LONG_PROMPT = "long_prompt"  # long prompt, short answer, streamed
    CHOICES = "choices"  # n = 4, streamed
    COMPLETION = "completion"  # not streamed
    SAMPLING = "sampling"  # logprobs and penalties, streamed
    ABORT = "abort"  # the client goes away after a few chunks


@dataclass(frozen=True)
class Mix:
    """Weights of the kinds, and lengths: ``(least, most)`` words of a prompt, tokens of an answer."""

    weights: Mapping[Kind, float]
    chat_words: tuple[int, int] = (8, 60)
    chat_tokens: tuple[int, int] = (24, 96)
    long_words: tuple[int, int] = (500, 1100)
    long_tokens: tuple[int, int] = (8, 32)


@dataclass(frozen=True)
class Ask:
    """One request to be made: where, with which body, and how many chunks until the client leaves."""

    index: int
    kind: Kind
    path: str
    body: dict[str, Any]
    abort_after_chunks: int | None = None


def ask(mix: Mix, model: str, seed: int, index: int) -> Ask:
    """Request number ``index`` of the run with ``seed``."""
    rng = random.Random(f"{seed}:{index}")
    kinds = [kind for kind in Kind if mix.weights.get(kind, 0) > 0]
    kind = rng.choices(kinds, [mix.weights[k] for k in kinds])[0]
    long = kind is Kind.LONG_PROMPT
    words = rng.choices(WORDS, k=rng.randint(*(mix.long_words if long else mix.chat_words)))
    tokens = rng.randint(*(mix.long_tokens if long else mix.chat_tokens))
    text = f"{index} {' '.join(words)}"
    # No "seed": vLLM's CPU build dies of a seeded request whose prompt is computed in two steps.
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "ignore_eos": True,  # a random model ends by chance; lengths are the mix's to choose
        "temperature": 1.0,
        "stream": kind is not Kind.COMPLETION,
    }
    if kind is Kind.COMPLETION:
        return Ask(index, kind, COMPLETION_PATH, body | {"prompt": text})
    body["messages"] = [{"role": "user", "content": text}]
    if kind is Kind.CHOICES:
        body["n"] = 4
    elif kind is Kind.SAMPLING:
        body |= {"logprobs": True, "top_logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    leaves = rng.randint(2, 8) if kind is Kind.ABORT else None
    return Ask(index, kind, CHAT_PATH, body, leaves)
