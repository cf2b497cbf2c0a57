"""Cluster descriptions: files, presets, errors with the place in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cluster import ClusterSpec
from autopar.errors import ClusterError
from autopar.layout import Mesh

TEXT = """
name: lab
devices: 16
device: {type: cuda, memory_bytes: 80e9, flops_per_s: {float32: 156e12}, memory_bytes_per_s: 2.0e12}
links:
  - {devices: 8, latency_s: 3e-6, bytes_per_s: 230e9}
  - {devices: 16, latency_s: 8e-6, bytes_per_s: 24e9}
"""


def written(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_file_is_read_with_numbers_as_people_write_them(tmp_path: Path) -> None:
    cluster = ClusterSpec.load(written(tmp_path, TEXT))
    assert cluster.devices == 16
    assert cluster.memory_bytes == 80e9
    assert cluster.device.peak("float32") == 156e12
    assert cluster.device.peak("float64") == 78e12


def test_json_says_the_same_as_yaml(tmp_path: Path) -> None:
    cluster = ClusterSpec.load(written(tmp_path, TEXT))
    again = ClusterSpec.load(written(tmp_path, cluster.model_dump_json(), "cluster.json"))
    assert again == cluster


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("devices: 16\n", "devices: 0\n", "devices: Input should be greater than or equal to 1"),
        ("80e9", "-1", "device.memory_bytes: Input should be greater than 0"),
        ("80e9", ".nan", "device.memory_bytes: "),
        ("type: cuda, ", "", "device.type: Field required"),
        ("name: lab", "name: lab\ncolour: red", "colour: Extra inputs are not permitted"),
        ("latency_s: 8e-6", "latency_s: fast", "links.1.latency_s: Input should be a valid number"),
        ("devices: 8,", "devices: 5,", "links: a level of 16 devices cannot consist of groups of 5"),
        ("devices: 16, latency", "devices: 8, latency", "links: a level of 8 devices cannot consist of groups of 8"),
    ],
)
def test_an_error_names_the_place_in_the_file(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new))
    with pytest.raises(ClusterError, match=r"cluster\.yaml: ") as caught:
        ClusterSpec.load(path)
    assert place in str(caught.value)


def test_a_missing_or_broken_file_is_a_cluster_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        ClusterSpec.load(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match=r"broken\.yaml"):
        ClusterSpec.load(written(tmp_path, "a: [1", "broken.yaml"))
    with pytest.raises(ClusterError, match="expected a mapping, found list"):
        ClusterSpec.load(written(tmp_path, "- 1"))


def test_presets_are_sized_by_devices_or_hosts() -> None:
    assert ClusterSpec.preset("cpu-gloo", devices=3).devices == 3
    cluster = ClusterSpec.preset("dgx-h100", hosts=4)
    assert cluster.devices == 32
    assert [link.devices for link in cluster.links] == [8, 32]
    assert cluster.with_devices(8).devices == 8
    assert [link.devices for link in cluster.with_devices(16).links] == [8, 16]
    with pytest.raises(ClusterError, match="no preset 'dgx'"):
        ClusterSpec.preset("dgx")


def test_an_axis_uses_the_slowest_link_on_its_way() -> None:
    cluster = ClusterSpec.preset("dgx-h100", hosts=2)
    mesh = Mesh(("data", "model"), (2, 8))
    assert cluster.link(mesh, "model").devices == 8
    assert cluster.link(mesh, "data").devices == 16
