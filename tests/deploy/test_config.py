"""Cluster files: the default one, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartupError
from deploy.config import DEFAULT_CLUSTER_FILE, ClusterConfig, load_cluster_config, override, ray_of_workers


def load_text(tmp_path: Path, text: str) -> ClusterConfig:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_cluster_config(path)


def test_default_file_says_what_the_defaults_are() -> None:
    assert load_cluster_config(DEFAULT_CLUSTER_FILE) == ClusterConfig()


def test_empty_file_is_the_default_cluster(tmp_path: Path) -> None:
    assert load_text(tmp_path, "# nothing\n") == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\ndecoder:\n  workers: 1\n", r"mine\.yaml:2: decoder: unknown key; did you mean 'decode'\?"),
        ("decode:\n  wrokers: 1\n", r"mine\.yaml:2: decode\.wrokers: unknown key; did you mean 'workers'\?"),
        ("decode:\n  workers: two\n", r"mine\.yaml:2: decode\.workers: .*not 'two'"),
        ("decode:\n  workers: '1'\n", r"mine\.yaml:2: decode\.workers: .*integer"),
        ("decode:\n  workers: true\n", r"mine\.yaml:2: decode\.workers"),
        ("block_tokens: 0\n", r"mine\.yaml:1: block_tokens: .*greater than or equal to 1"),
        ("model: a\nmodel: b\n", r"mine\.yaml:2: model: stands twice"),
        ("decode: {workers: 0}\n", "no worker decodes"),
        ("decode: {workers: 0}\naggregated: {workers: 1}\n", "prefill workers need decode workers"),
        ("prefill: {workers: 0}\nrouter: {prefill_fallback: deny}\n", "may not prefill"),
        ("a: [\n", r"mine\.yaml:\d+: is not YAML"),
        ("- a\n", "must be a mapping"),
        ("dtype: fp8\ndecoder: 1\n", r"\(and 1 more\)"),
    ],
)
def test_wrong_file_is_one_line_with_file_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(StartupError, match=said) as error:
        load_text(tmp_path, text)
    assert "\n" not in error.value.message


def test_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        load_cluster_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="not UTF-8"):
        load_cluster_config(tmp_path / "binary.yaml")


def test_flags_replace_single_keys() -> None:
    config = override(ClusterConfig(), {"prefill.workers": 2, "router.port": 9000, "transports": ("tcp",)})
    assert (config.prefill.workers, config.router.port, config.transports) == (2, 9000, ("tcp",))
    assert config.decode == ClusterConfig().decode


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router.port": 70000}, "router.port is 70000"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"decode.workers": 0}, "no worker decodes"),
    ],
)
def test_wrong_flag_names_the_key(values: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        override(ClusterConfig(), values)


def test_worker_of_several_ranks_asks_ray_for_all_of_them_at_once() -> None:
    ray = {"prefill_resources": {"GPU": 1, "CPU": 0.5}, "decode_resources": {"GPU": 1}}
    config = override(ClusterConfig(), {"ray": ray, "prefill.tensor_parallel": 4})
    asked = ray_of_workers(config)
    assert asked.prefill_resources == {"GPU": 4, "CPU": 2}
    assert asked.decode_resources == {"GPU": 1}
    assert (asked.aggregated_resources, asked.name) == ({}, config.ray.name)
