"""Making API keys: the key is shown once, the file holds its name and SHA-256 only."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from cluster.errors import StartupError

KEY_PREFIX = "tdm-"
KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_key(name: str, path: Path, *, is_admin: bool = False) -> str:
    """A new key, whose digest is appended to the file (mode 0600). Raises `StartupError`.

    `is_admin`: it may also look at the cluster (`tandem status`, `tandem explain`) and drain workers.
    """
    if not _NAME.fullmatch(name):
        raise StartupError(f"key name {name!r}: 1 to 64 letters, digits, dots, dashes, underscores")
    try:
        existing = path.read_text() if path.exists() else ""
        if any(line.split()[:1] == [name] for line in existing.splitlines()):
            raise StartupError(f"{path} has a key named {name} already: remove its line, or choose another name")
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        file_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(file_fd, "a") as file:
            file.write(f"{name} {hashlib.sha256(key.encode()).hexdigest()}{' admin' if is_admin else ''}\n")
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    return key
