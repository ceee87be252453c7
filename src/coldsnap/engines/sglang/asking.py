"""One completion of an SGLang server, with the ids of its tokens.

The one rule: ``/generate`` is asked, not the API of OpenAI's form: only there does every release tell token ids, and
take the request's id, which lets the acceptance request through the closed door.
"""

from __future__ import annotations

from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.endpoint import UNWATCHED, Watch, stream
from coldsnap.errors import EngineError
from coldsnap.keeper.directive import Endpoint

__all__ = ["ask"]


def ask(
    endpoint: Endpoint, question: Question, *, timeout_s: float, request_id: str = "", watch: Watch = UNWATCHED
) -> Answer:
    """Put the question through ``/generate``.

    Greedy decoding draws nothing, so that no seed is sent: SGLang takes one only when it serves deterministically.

    Args:
        endpoint: The engine.
        question: What to ask.
        timeout_s: For the whole answer, s.
        request_id: The request's id; the key of an engine that is not open to others yet.
        watch: What ends the wait before its time.

    Raises:
        EngineError: The engine ended, refused, broke off, took too long, or answered without token ids.
    """
    sampling = {"temperature": 0, "max_new_tokens": question.max_tokens, "ignore_eos": True}
    body = {"text": question.prompt, "sampling_params": sampling, "stream": True}
    body |= {"rid": request_id} if request_id else {}
    token_ids: list[int] = []
    text = ""
    first_s = last_s = 0.0
    for last_s, event in stream(endpoint, "/generate", body, timeout_s=timeout_s, watch=watch):
        if "error" in event:
            raise EngineError(f"the engine broke off its answer: {event['error']}")
        told = list(event.get("output_ids") or ())
        if told and not first_s:
            first_s = last_s
        # Each event repeats what was told before, unless the server was started with --incremental-streaming-output.
        whole = len(told) == (event.get("meta_info") or {}).get("completion_tokens")
        token_ids = told if whole else token_ids + told
        text = event.get("text", "") if whole else text + event.get("text", "")
    if len(token_ids) != question.max_tokens:
        raise EngineError(f"expected {question.max_tokens} token ids from {endpoint.url}, got {len(token_ids)}")
    return Answer(token_ids=tuple(token_ids), text=text, first_token_s=first_s, seconds=last_s)
