"""Which published faults a Redis or Valkey server still has, by what `INFO server` says.

Only faults that let an authenticated client run code in the server count: it holds no secret but its own password.
"""

from __future__ import annotations

from collections.abc import Mapping

Version = tuple[int, int, int]

LUA_FAULTS = "CVE-2025-49844, CVE-2025-46817, CVE-2025-46818"
UNBLOCK_FAULT = "CVE-2026-23479"

# First fixed version of each branch; a branch that is not listed and is newer than all of them was born fixed.
_LUA_FIXED: dict[str, dict[tuple[int, int], Version]] = {
    "redis": {(6, 2): (6, 2, 20), (7, 2): (7, 2, 11), (7, 4): (7, 4, 6), (8, 0): (8, 0, 4), (8, 2): (8, 2, 2)},
    "valkey": {(7, 2): (7, 2, 11), (8, 0): (8, 0, 6), (8, 1): (8, 1, 4)},
}
_UNBLOCK_AFFECTED: tuple[Version, Version] = ((7, 2, 0), (8, 6, 2))


def known_faults(server_info: Mapping[str, object]) -> str:
    """The faults of the server, as text for a warning; empty when none is known."""
    kind = "valkey" if "valkey_version" in server_info else "redis"
    version = _parse(str(server_info.get(f"{kind}_version", "")))
    if version is None:
        return f"its version {server_info.get(f'{kind}_version')!r} cannot be read"
    faults = [LUA_FAULTS] if _has_lua_faults(kind, version) else []
    if kind == "redis" and _UNBLOCK_AFFECTED[0] <= version <= _UNBLOCK_AFFECTED[1]:
        faults.append(UNBLOCK_FAULT)
    return f"{kind} {'.'.join(map(str, version))} has {', '.join(faults)}: update it" if faults else ""


def _has_lua_faults(kind: str, version: Version) -> bool:
    fixed_by_branch = _LUA_FIXED[kind]
    fixed = fixed_by_branch.get(version[:2])
    return version < fixed if fixed else version < max(fixed_by_branch.values())


def _parse(text: str) -> Version | None:
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return (int(parts[0]), int(parts[1]), int(parts[2]))
