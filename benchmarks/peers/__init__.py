"""Whom ours are measured beside, by name. Each peer's class says how it is found, refuses and is called."""

from __future__ import annotations

from .base import Peer
from .flash_infer import FlashInfer, Xqa
from .newer_flash import Flash3, Flash4, NewerFlash
from .pytorch import Cudnn, Efficient, Flash, Math

PEERS: dict[str, Peer] = {
    "flash": Flash(),
    "cudnn": Cudnn(),
    "efficient": Efficient(),
    "math": Math(),
    "flash3": Flash3(),
    "flash4": Flash4(),
    "flashinfer": FlashInfer(),
    "xqa": Xqa(),
}
DETERMINISTIC = " deterministic"  # behind a family's or a peer's name


def named(*calls: str) -> list[str]:
    """The peers that are called with any of these."""
    return [name for name, peer in PEERS.items() if peer.calls & {*calls}]


def with_modes(names: list[str]) -> list[str]:
    """Names with the deterministic mode of those that have one."""
    return [name + mode for name in names for mode in ("", DETERMINISTIC)[: 1 + PEERS[name].deterministic]]


def is_newer(name: str) -> bool:
    """Is it a kernel that PyTorch does not ship?"""
    return isinstance(PEERS.get(name), NewerFlash)


def title(name: str) -> str:
    """Of a peer, with its mode."""
    free, *mode = name.split()
    return " ".join([PEERS[free].title, *mode]) if is_newer(free) else f"PyTorch's {name}"
