"""Acceptance: one deterministic completion, recorded at capture and equal at restore.

The one rule: token ids are compared, not texts alone, and from the first to the last; a restored engine that answers
almost as before is not restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from coldsnap.engines.endpoint import UNWATCHED, Watch, stream
from coldsnap.errors import AcceptanceError, EngineError
from coldsnap.keeper.directive import Endpoint

__all__ = ["Answer", "Question", "ask", "compare"]


@frozen(kw_only=True)
class Question:
    """A completion that has one right answer.

    Attributes:
        prompt: The text.
        max_tokens: How many tokens are generated; the end-of-sequence token does not end it earlier.
        seed: Sent with the request. Greedy decoding needs none, but an engine's sampler may draw all the same.
    """

    prompt: str
    max_tokens: int = 16
    seed: int = 0


@frozen(kw_only=True)
class Answer:
    """What an engine answered.

    Attributes:
        token_ids: Every generated token.
        text: Their text.
        first_token_s: From the request to the first token, s; not part of equality.
        seconds: From the request to the last, s; not part of equality.
    """

    token_ids: tuple[int, ...]
    text: str
    first_token_s: float = field(default=0.0, eq=False)
    seconds: float = field(default=0.0, eq=False)


def ask(
    endpoint: Endpoint,
    question: Question,
    *,
    model: str,
    timeout_s: float,
    request_id: str = "",
    watch: Watch = UNWATCHED,
) -> Answer:
    """Put the question through ``/v1/completions``.

    Args:
        endpoint: The engine.
        question: What to ask.
        model: The name under which the engine serves its model.
        timeout_s: For the whole answer, s.
        request_id: Becomes part of the request's id; the key of an engine that is not open to others yet.
        watch: What ends the wait before its time.

    Raises:
        EngineError: The engine ended, refused, broke off, took too long, or answered without token ids.
    """
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "seed": question.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    headers = {"X-Request-Id": request_id} if request_id else {}
    token_ids: list[int] = []
    text: list[str] = []
    first_s = last_s = 0.0
    for last_s, event in stream(endpoint, "/v1/completions", body, timeout_s=timeout_s, headers=headers, watch=watch):
        for choice in _choices(event):
            if choice.get("token_ids") and not token_ids:
                first_s = last_s
            token_ids.extend(choice.get("token_ids") or ())
            text.append(choice.get("text") or "")
    if len(token_ids) != question.max_tokens:
        raise EngineError(f"expected {question.max_tokens} token ids from {model}, got {len(token_ids)}")
    return Answer(token_ids=tuple(token_ids), text="".join(text), first_token_s=first_s, seconds=last_s)


def _choices(event: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if "error" in event:
        raise EngineError(f"the engine broke off its answer: {event['error']}")
    return event.get("choices") or ()


def compare(expected: Answer, actual: Answer) -> None:
    """Demand that two answers are the same.

    Raises:
        AcceptanceError: With the place of the first difference.
    """
    if actual == expected:
        return
    pairs = zip(expected.token_ids, actual.token_ids, strict=False)
    shortest = min(len(expected.token_ids), len(actual.token_ids))
    at = next((index for index, (left, right) in enumerate(pairs) if left != right), shortest)
    same_tokens = expected.token_ids == actual.token_ids
    where = "the same tokens give another text" if same_tokens else f"the answers differ from token {at} on"
    raise AcceptanceError(
        f"the engine does not answer as it did at capture: {where}; the process state is not what was captured",
        expected=_shown(expected),
        actual=_shown(actual),
    )


def _shown(answer: Answer) -> str:
    return f"{list(answer.token_ids)} {answer.text!r}"
