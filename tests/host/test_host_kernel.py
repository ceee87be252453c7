"""The kernel's own files, read from samples."""

import socket

import pytest

from coldsnap.host import diagnostics
from coldsnap.host.gpus import nvidia_driver
from coldsnap.host.kernel import KernelFiles, capability_names, listening_ports, ports_in_tables
from coldsnap.host.probe import probe_cpu, probe_kernel, probe_memory, probe_privileges

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1646 1
   1: 020200C0:C13E 507100CB:01BB 01 00000000:00000000 00:00000000 00000000     0        0 13909 1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000
"""
# Everything but CAP_SYS_RESOURCE, as containers of some providers have it.
ALL_BUT_RESOURCE = "000001fffeffffff"
DOCKER_DEFAULT = "00000000a80425fb"
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\nGCC version:\n"
)
CLOSED_DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:\n"
)


def test_only_listening_ports_of_both_families_are_reported():
    assert ports_in_tables(TCP, TCP6, "") == (80, 2024)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_is_asked_for_its_listeners_alone(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        assert server.getsockname()[1] in diagnostics.listening_ports()
        assert client.getsockname()[1] not in diagnostics.listening_ports()
        assert server.getsockname()[1] in listening_ports(KernelFiles())


def test_a_question_that_the_kernel_does_not_know_is_an_error():
    with pytest.raises(OSError, match="socket diagnostics"):
        list(diagnostics.answers(diagnostics.INET_REQUEST.pack(255, socket.IPPROTO_TCP, 0, 0, 0)))


def test_a_capability_mask_is_read_by_name():
    assert "CAP_CHECKPOINT_RESTORE" in capability_names(ALL_BUT_RESOURCE)
    assert "CAP_SYS_RESOURCE" not in capability_names(ALL_BUT_RESOURCE)
    assert capability_names("0") == ()
    assert capability_names("1") == ("CAP_CHOWN",)


def test_root_without_sys_resource_has_all_that_criu_needs(machine):
    machine.process(10, own=True, capabilities=ALL_BUT_RESOURCE)

    assert probe_privileges(machine.kernel).missing_capabilities == ()


def test_a_container_with_default_capabilities_lacks_exactly_the_three_to_add(machine):
    machine.process(10, own=True, capabilities=DOCKER_DEFAULT)

    assert probe_privileges(machine.kernel).missing_capabilities == ("CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SYS_TIME")


def test_ptrace_is_needed_where_yama_restricts_it(machine):
    machine.process(10, own=True, capabilities=DOCKER_DEFAULT)
    machine.put("/proc/sys/kernel/yama/ptrace_scope", "1\n")

    assert "CAP_SYS_PTRACE" in probe_privileges(machine.kernel).missing_capabilities


def test_the_effective_user_counts_and_not_the_real_one(machine):
    machine.process(10, own=True, euid=0)

    assert probe_privileges(machine.kernel).euid == 0


def test_every_filtered_ancestor_up_to_pid_1_is_named_nearest_first(machine):
    machine.process(30, own=True, ppid=20, seccomp=2)
    machine.process(20, name="bash", ppid=1, seccomp=2)
    machine.process(1, name="tini", seccomp=2)

    privileges = probe_privileges(machine.kernel)

    assert privileges.seccomp == "filter"
    assert privileges.filtered_ancestors == ("python (pid 30)", "bash (pid 20)", "tini (pid 1)")


def test_a_machine_without_any_file_is_still_described(machine):
    privileges = probe_privileges(machine.kernel)
    kernel = probe_kernel(machine.kernel, privileges)

    assert privileges.capabilities == ()
    assert kernel.namespaces == ()
    assert kernel.io_uring_disabled is None
    assert not kernel.last_pid_writable
    assert probe_memory(machine.kernel).total_bytes == 0


def test_namespaces_need_kernel_support_and_the_right_to_create_them(machine):
    for name in ("ipc", "mnt", "pid", "user", "uts"):
        machine.put(f"/proc/self/ns/{name}", "")
    machine.process(10, own=True, capabilities=ALL_BUT_RESOURCE)
    allowed = probe_kernel(machine.kernel, probe_privileges(machine.kernel))
    machine.process(10, own=True, capabilities="0")
    machine.put("/proc/sys/kernel/unprivileged_userns_clone", "0")
    refused = probe_kernel(machine.kernel, probe_privileges(machine.kernel))

    assert allowed.namespaces == ("ipc", "mount", "pid", "user")
    assert refused.namespaces == ()


def test_the_selected_huge_page_mode_is_the_one_in_brackets(machine):
    machine.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")

    assert probe_kernel(machine.kernel, probe_privileges(machine.kernel)).transparent_huge_pages == "madvise"


def test_processor_and_memory_are_read(machine):
    machine.put(
        "/proc/cpuinfo",
        "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: sse avx2 sse\npower management:\n\nprocessor\t: 1\n",
    )
    machine.put("/proc/meminfo", "MemTotal:       24684092 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n")

    assert probe_cpu(machine.kernel).model == "AMD EPYC"
    assert probe_cpu(machine.kernel).flags == ("avx2", "sse")
    assert probe_memory(machine.kernel).total_bytes == 24684092 * 1024


def test_the_nvidia_driver_is_read_whether_open_or_closed(machine):
    assert nvidia_driver(machine.kernel) is None

    machine.put("/sys/module/nvidia/version", "610.10\n")
    assert nvidia_driver(machine.kernel) == "610.10"

    machine.put("/proc/driver/nvidia/version", OPEN_DRIVER)
    assert nvidia_driver(machine.kernel) == "580.159.04"

    machine.put("/proc/driver/nvidia/version", CLOSED_DRIVER)
    assert nvidia_driver(machine.kernel) == "550.54.15"
