"""Cluster descriptions: files, presets, errors with the place in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cluster import ClusterSpec, parse
from autopar.errors import ClusterError
from autopar.layout import Mesh
from autopar.presets import PRESETS

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
        ("devices: 8,", "devices: 5,", "links.1.devices: a level of 16 devices cannot consist of groups of 5"),
        (
            "devices: 16, latency",
            "devices: 8, latency",
            "links.1.devices: a level of 8 devices cannot consist of groups of 8",
        ),
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


def shape(cluster: ClusterSpec, mesh: Mesh, axis: str) -> list[tuple[int, int, int, int]]:
    """(devices, of which level, behind one link, groups at a time) of every level of an axis."""
    levels = cluster.topology(mesh, axis).levels
    return [(x.devices, x.link.devices, x.behind, x.groups) for x in levels]


def test_an_axis_says_how_many_of_its_devices_lie_in_each_level() -> None:
    cluster = ClusterSpec.preset("dgx-h100", hosts=4)
    two = Mesh(("data", "model"), (4, 8))
    assert shape(cluster, two, "model") == [(8, 8, 1, 1)]
    assert shape(cluster, two, "data") == [(4, 32, 1, 1)]
    assert shape(cluster, Mesh(("data",), (32,)), "data") == [(8, 8, 1, 1), (4, 32, 1, 1)]
    wide = Mesh(("data", "model"), (2, 16))
    assert shape(cluster, wide, "model") == [(8, 8, 1, 1), (2, 32, 1, 1)]
    three = Mesh(("data", "rows", "model"), (2, 4, 4))
    assert shape(cluster, three, "rows") == [(2, 8, 1, 1), (2, 32, 1, 1)]
    assert shape(cluster, Mesh(("one", "data"), (1, 32)), "one") == []


def test_microbatches_are_no_devices() -> None:
    cluster = ClusterSpec.preset("dgx-h100", hosts=4)
    assert cluster.topology(Mesh(("data", "model", "micro"), (4, 8, 6)), "data") == cluster.topology(
        Mesh(("data", "model"), (4, 8)), "data"
    )


RACKS = [
    {"devices": 4, "latency_s": 2e-6, "bytes_per_s": 2e11},
    {"devices": 24, "latency_s": 5e-6, "bytes_per_s": 5e10, "shared_by": 2},
    {"devices": 48, "latency_s": 9e-6, "bytes_per_s": 1e10, "shared_by": 12},
]


def racks() -> ClusterSpec:
    device = {"type": "cuda", "memory_bytes": 80e9, "flops_per_s": {"float32": 156e12}, "memory_bytes_per_s": 2e12}
    return parse({"name": "racks", "devices": 48, "device": device, "links": RACKS}, "racks")


def test_three_levels_and_cards_that_several_devices_share() -> None:
    whole = Mesh(("data",), (48,))
    assert shape(racks(), whole, "data") == [(4, 4, 1, 1), (6, 24, 2, 1), (2, 48, 12, 1)]
    hosts = Mesh(("data", "model"), (12, 4))
    assert shape(racks(), hosts, "data") == [(6, 24, 1, 2), (2, 48, 3, 4)]
    assert shape(racks(), Mesh(("data", "model"), (2, 24)), "data") == [(2, 48, 1, 12)]


@pytest.mark.parametrize(
    ("sizes", "axis", "level"),
    [
        ((16, 3), "model", 24),
        ((8, 6), "model", 24),
        ((3, 16), "model", 48),
        ((16, 3), "data", 48),
        ((8, 6), "data", 48),
    ],
)
def test_groups_that_do_not_fill_blocks_alike_are_flat_on_the_slowest_level(
    sizes: tuple[int, int], axis: str, level: int
) -> None:
    mesh = Mesh(("data", "model"), sizes)
    (only,) = racks().topology(mesh, axis).levels
    assert (only.devices, only.link.devices) == (mesh.size(axis), level)
    assert (only.behind, only.groups) == (1, only.link.shared_by)


def test_every_preset_can_have_any_number_of_devices() -> None:
    for name, (_, per_host) in PRESETS.items():
        for devices in (1, per_host // 2, per_host, per_host + 3, 3 * per_host):
            cluster = ClusterSpec.preset(name, devices=devices)
            assert cluster.devices == devices
            assert cluster.way(1, devices).devices == devices
            assert cluster.with_devices(2 * per_host + 1).way(1, 2).devices == 2
            assert cluster.with_devices(2).way(1, 2).devices == 2


LINES = """
links:
  - devices: 16
    latency_s: 8e-6
    bytes_per_s: 24e9
    start_s: 2e-5
    shared_by: 4
    measured:
      - {collective: all_reduce, devices: 4, points: [[1024, 2e-5], [4096, 3e-5]]}
      - {collective: all_gather, devices: 16, points: [[1024, 2e-5], [4096, 3e-5], [65536, 4e-5]]}
"""
MEASURED = TEXT[: TEXT.index("links:")] + LINES.lstrip()


def test_measured_curves_are_read_from_a_file(tmp_path: Path) -> None:
    cluster = ClusterSpec.load(written(tmp_path, MEASURED))
    assert ClusterSpec.load(written(tmp_path, cluster.model_dump_json(), "cluster.json")) == cluster
    (link,) = cluster.links
    assert (link.start_s, link.shared_by) == (2e-5, 4)
    assert [curve.devices for curve in cluster.way(1, 16).measured] == [16]
    assert [curve.collective for curve in cluster.way(4, 4).measured] == ["all_reduce"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[4096, 3e-5]]}", "[512, 3e-5]]}", "links.0.measured.0.points.1: sizes must ascend, but 512.0 follow 1024.0"),
        ("[65536, 4e-5]", "[4096, 4e-5]", "links.0.measured.1.points.2: sizes must ascend, but 4096.0 follow 4096.0"),
        ("[1024, 2e-5]", "[1024, 0]", "links.0.measured.0.points.0.1: Input should be greater than 0 (found 0)"),
        ("[1024, 2e-5]", "[.inf, 2e-5]", "links.0.measured.0.points.0.0: Input should be a finite number"),
        ("[1024, 2e-5]", "[1024]", "links.0.measured.0.points.0.1: Field required"),
        ("all_reduce", "all_sum", "links.0.measured.0.collective: Input should be 'all_reduce', 'reduce_scatter', "),
        ("devices: 4, points", "devices: 1, points", "links.0.measured.0.devices: Input should be greater than or"),
        (
            "points: [[1024, 2e-5], [4096, 3e-5]]}",
            "points: []}",
            "links.0.measured.0.points: Tuple should have at least",
        ),
        ("shared_by: 4", "shared_by: 0", "links.0.shared_by: Input should be greater than or equal to 1 (found 0)"),
        ("shared_by: 4", "shared_by: 17", "links.0.shared_by: 17 devices cannot share a link in a level of 16"),
        ("start_s: 2e-5", "start_s: -1", "links.0.start_s: Input should be greater than or equal to 0 (found -1)"),
        ("bytes_per_s: 24e9", "bytes_per_s: 0", "links.0.bytes_per_s: Input should be greater than 0 (found 0)"),
        ("bytes_per_s: 24e9", "bytes_per_s: -3", "links.0.bytes_per_s: Input should be greater than 0 (found -3)"),
        ("bytes_per_s: 24e9", "bytes_per_s: .nan", "links.0.bytes_per_s: Input should be "),
        ("bytes_per_s: 24e9", "bytes_per_s: .inf", "links.0.bytes_per_s: Input should be a finite number"),
        ("bytes_per_s: 24e9", "speed: 3", "links.0.bytes_per_s: Field required; links.0.speed: Extra inputs are not"),
        (
            "devices: 16\n    latency",
            "devices: 8\n    latency",
            "links.0.devices: the outermost level connects 8 of 16 devices",
        ),
        (LINES.lstrip(), "links: []", "links: Tuple should have at least 1 item"),
        (LINES.lstrip(), "", "links: Field required"),
        ("name: lab", "library: mpi\nname: lab", "library: Input should be 'any', 'nccl' or 'gloo' (found 'mpi')"),
    ],
)
def test_an_error_in_a_link_names_the_place_in_the_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MEASURED
    path = written(tmp_path, MEASURED.replace(old, new, 1))
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(path)
    assert str(caught.value).startswith(f"{path}: {message}"), caught.value
