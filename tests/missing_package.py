"""As if a package were not installed."""

from __future__ import annotations

import sys

import pytest


class _Without:
    """An importer that does not find one package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, importing ``package`` fails, also if it was imported before."""
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [_Without(package), *sys.meta_path])
