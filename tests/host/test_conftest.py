"""Where the host modules are kept."""

from __future__ import annotations

from types import SimpleNamespace

from conftest import kept


def test_without_pytests_cache(monkeypatch, tmp_path):
    """`pytest -p no:cacheprovider` has a configuration without a cache."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = kept(SimpleNamespace())
    assert folder.parent == tmp_path
    assert kept(SimpleNamespace()) == folder
