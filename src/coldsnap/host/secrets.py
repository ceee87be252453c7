"""Environment names that look like secrets. Names only: a value is never looked at, kept or shown.

The one rule: memory of a captured process holds its environment, so whatever is in it can be read from the artifact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["secret_names"]

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS|APIKEY|KEY)(_|$)")
# Not secrets, however they are spelt.
_PLAIN = frozenset({"TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK"})


def secret_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that look like secrets, sorted: ``HF_TOKEN``, ``OPENAI_API_KEY``, ``AWS_SECRET_ACCESS_KEY``."""
    return tuple(sorted(name for name in names if name not in _PLAIN and _SECRET.search(name.upper())))
