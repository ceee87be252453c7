"""What keeps a host from working, in words."""

from pathlib import Path

import pytest
from attrs import evolve

from coldsnap.host.doctor import problems, slow_restores

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_a_sound_host_has_no_problem(host):
    assert problems(host()) == ()


CASES = {
    "no criu executable": lambda host: host(criu=None),
    "is 4.1.1, needed 4.2": lambda host: host(criu=evolve(host().criu, version=(4, 1, 1))),
    "cannot be used: no such file": lambda host: host(
        criu=evolve(host().criu, version=(), check_ok=False, check_message="no such file")
    ),
    "criu check fails": lambda host: host(criu=evolve(host().criu, check_ok=False, check_message="no kcmp")),
    "CAP_NET_ADMIN, CAP_SETPCAP": lambda host: host(privileges=evolve(host().privileges, capabilities=())),
    "comes from tini (pid 1)": lambda host: host(
        privileges=evolve(host().privileges, seccomp="filter", filtered_ancestors=("python (pid 9)", "tini (pid 1)"))
    ),
    "private ipc, mount, pid namespaces": lambda host: host(kernel=evolve(host().kernel, namespaces=("user",))),
}


@pytest.mark.parametrize("says", CASES)
def test_each_obstacle_is_said_with_its_chapter(host, says):
    (sentence,) = problems(CASES[says](host))

    assert says in sentence
    anchor = sentence.partition("docs/deploy.md#")[2].rstrip(")")
    headings = [
        line.lstrip("# ").strip().lower().replace(" ", "-")
        for line in DEPLOY.read_text().splitlines()
        if line.startswith("#")
    ]
    assert anchor in headings


def test_all_obstacles_are_said_at_once(host):
    bad = host(
        criu=None,
        privileges=evolve(host().privileges, capabilities=(), seccomp="filter"),
        kernel=evolve(host().kernel, namespaces=()),
    )

    assert len(problems(bad)) == 4


def test_the_hosts_own_namespaces_need_no_new_ones(host):
    assert problems(host(kernel=evolve(host().kernel, namespaces=())), namespace="host") == ()


@pytest.mark.parametrize("mode", ["madvise", "never"])
def test_huge_pages_that_are_not_for_everybody_make_restores_slower(mode):
    ((kind, sentence),) = slow_restores(mode, "tmpfs")

    assert kind == "huge-pages"
    assert repr(mode) in sentence
    assert "write always to /sys/kernel/mm/transparent_hugepage/enabled" in sentence


def test_a_run_directory_on_disk_makes_criu_probe_the_kernel_each_time():
    ((kind, sentence),) = slow_restores("always", "ext4")

    assert kind == "criu-cache"
    assert "/run is on ext4" in sentence


def test_nothing_is_said_of_a_machine_set_up_for_restores_or_of_what_is_not_known():
    assert [*slow_restores("always", "tmpfs"), *slow_restores("unknown", "tmpfs")] == []
