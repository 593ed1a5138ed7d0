"""Deaths of workers and of their template: the remaining processes continue, and nothing is left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import lacking

import gpuload

LIMIT_S = 120.0

# The beginning of the programs below.
PRELUDE = """
    import logging
    logging.disable()
    def pool():
        return loader._session.engine
    def is_steady():
        pool().collect_events(0.0)
        return pool().is_steady and len(template_pids()) == 1 and pool()._template.ready
    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pool().collect_events(0.0) or process_state(pid) == "gone" and is_steady(), "it is replaced")
    loader = number_loader(persistent_workers=True, faults=gl.Faults(max_restarts=10**6))
"""


@pytest.fixture
def run_with_prelude(run_without_errors):
    return lambda code: run_without_errors(textwrap.dedent(PRELUDE) + textwrap.dedent(code))


def test_a_worker_holds_only_its_own_pipe_ends_and_dies_alone(run_with_prelude):
    run_with_prelude("""
        def pipe_ends(pid):
            ends = {}
            for name in os.listdir(f"/proc/{pid}/fd"):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if "pidfd" in link and pid != template:
                    ends[link] = "pidfd"
                if link.startswith("pipe:"):
                    info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                    flags = int(info.split("flags:")[1].split()[0], 8)
                    ends[link] = "write" if flags & os.O_ACCMODE == os.O_WRONLY else "read"
            return ends
        def are_separate():  # once the new worker has closed the descriptors that it inherits
            try:
                ends_of_template, *ends_of_workers = [pipe_ends(pid) for pid in (template, *worker_pids())]
            except FileNotFoundError:  # a descriptor was closed meanwhile
                return False
            all_ends = [*ends_of_template, *(link for ends in ends_of_workers for link in ends)]
            return (
                len(all_ends) == len(set(all_ends))  # each pipe end is in one process
                and sorted(ends_of_template.values()) == ["read", "write", "write"]  # the lifeline, and status pipes
                and [list(ends.values()) for ends in ends_of_workers] == [["read"], ["read"]]
            )
        check_epoch(loader)
        [template] = template_pids()
        for _ in range(3):
            others = set(worker_pids())
            victim = others.pop()
            kill(victim)
            assert others <= set(worker_pids()) and len(worker_pids()) == 2
            assert template_pids() == [template]
            wait_until(are_separate, "each process has only its own pipe ends")
        check_epoch(loader)
        loader.close()
    """)


def test_many_deaths_leave_no_descriptor_and_no_zombie(run_with_prelude):
    run_with_prelude("""
        def open_counts():
            return len(os.listdir("/proc/self/fd")), [len(os.listdir(f"/proc/{pid}/fd")) for pid in template_pids()]
        def zombies():
            pids = [pid for parent in ("self", *template_pids()) for pid in child_pids(parent)]
            return [pid for pid in pids if process_state(pid) == "Z"]
        check_epoch(loader)
        before = open_counts()
        for _ in range(50):
            kill(pool().pids[0])
            wait_until(lambda: (open_counts(), zombies()) == (before, []), "all descriptors and zombies are gone")
        first_pids = set(pool().pids)
        for number in range(10):
            kill(template_pids()[0])
            wait_until(lambda: open_counts()[0] == before[0] and not zombies(), "nothing of the template remains")
            assert child_pids() == server_pids()  # orphaned workers do not become children of this process
            if number == 5:  # a new template forks its replacement, and the other worker stays
                kill(pool().pids[0])
        assert len(first_pids & set(pool().pids)) == 1
        check_epoch(loader)
        loader.close()
        assert held_resources()[1] == 0, "child processes remain"
    """)


def test_a_worker_that_is_killed_as_soon_as_it_is_forked_is_replaced(run_with_prelude):
    run_with_prelude("""
        accept, forks = process.WorkerProcess.accept, []
        def accept_and_kill(self, *answer):
            error = accept(self, *answer)
            forks.append(self.pid)
            if len(forks) <= 20:
                os.kill(self.pid, signal.SIGKILL)
            if len(forks) in (4, 12, 19):  # some are even reaped before the pool has used them
                wait_until(lambda: process_state(self.pid) == "gone", "the worker is reaped")
            return error
        process.WorkerProcess.accept = accept_and_kill
        before = held_resources()
        check_epoch(loader)
        assert len(forks) == 22  # 20 workers that are killed, and two that remain
        causes = pool().deaths.causes
        assert len(causes) == 20 and all(cause.startswith("killed by SIGKILL") for cause in causes), causes
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)


def test_a_worker_is_used_although_its_template_died_after_the_fork(run_with_prelude):
    run_with_prelude("""
        accept, accepted = process.WorkerProcess.accept, []
        def accept_when_the_template_is_dead(self, *answer):
            if not accepted:
                [template] = template_pids()
                os.kill(template, signal.SIGKILL)
                wait_until(lambda: is_dead(template), "the template is dead")
            accepted.append(self)
            return accept(self, *answer)
        process.WorkerProcess.accept = accept_when_the_template_is_dead
        before = held_resources()
        check_epoch(loader)
        assert accepted[0].pid in pool().pids
        assert pool().deaths.causes == ["killed by SIGKILL"]
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)


@pytest.mark.parametrize("timeout", [0.5, 0])
def test_a_stopped_template_delays_no_sample_and_is_replaced(run_with_prelude, timeout):
    run_with_prelude(f"""
        from collections import Counter
        pool_module = sys.modules["gpuload.workers.pool"]
        pool_module.FORK_LIMIT_S = 1.0  # the limit without a timeout
        loader = number_loader(die_once_at(17, 29), timeout={timeout}, faults=gl.Faults(max_restarts=10**6))
        before = held_resources()
        batches = iter(loader)
        seen = [next(batches)]
        [first_pid] = template_pids()
        os.kill(first_pid, signal.SIGSTOP)
        counts_by_pending_fork = Counter()
        collect_events = pool_module.WorkerPool.collect_events
        def collect_and_count(self, timeout_s):
            counts_by_pending_fork[any(worker.pid is None for worker in self._team.values())] += 1
            return collect_events(self, min(timeout_s, 0.05))
        pool_module.WorkerPool.collect_events = collect_and_count
        seen += batches
        assert sorted(torch.cat(seen).tolist()) == list(range(40)), seen
        assert counts_by_pending_fork[True], "the pool waits for the template"
        limit = {timeout or 1}
        assert f"it did not fork a process for {{limit:g}} seconds" in pool().deaths.causes, pool().deaths.causes
        assert template_pids() != [first_pid]
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)


def test_close_ends_a_stopped_template_and_its_workers(run_with_prelude):
    run_with_prelude("""
        before = held_resources()
        batches = iter(loader)
        next(batches)
        [template] = template_pids()
        os.kill(template, signal.SIGSTOP)
        os.kill(pool().pids[0], signal.SIGKILL)
        wait_until(lambda: pool().collect_events(0.0) or len(pool().pids) == 1, "a replacement is pending")
        assert len(pool()._team) == 2
        loader.close()  # before its limit, KILL_WAIT_S
        assert is_dead(template)
        assert held_resources() == before, (held_resources(), before)
    """)


def test_worker_error_says_why_a_worker_cannot_be_forked(run_without_errors):
    run_without_errors("""
        class Data(Numbers):
            def __setstate__(self, state):
                vars(self).update(state)
                if "server" in Path("/proc/self/cmdline").read_text():
                    def fork():
                        raise OSError(11, "Resource temporarily unavailable")
                    os.fork = fork
        warnings.simplefilter("ignore", RuntimeWarning)  # about the first worker that cannot be forked
        before = held_resources()
        loader = gl.Loader(Data(), 4, num_workers=2, device="cpu")
        with pytest.raises(gl.WorkerError, match="(?s)^worker [01] could not be forked.*Resource temporarily"):
            next(iter(loader))
        loader.close()
        assert held_resources() == before, (held_resources(), before)
    """)


def test_signals_to_the_process_group_reach_the_program_alone(run_with_prelude):
    run_with_prelude("""
        received = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: received.append(number))
        def send():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.killpg(0, number)
        fork = process.Template.fork
        def fork_amid_signals(self, *request):
            send()
            forked = fork(self, *request)
            send()
            return forked
        process.Template.fork = fork_amid_signals
        check_epoch(loader)
        [template], first_workers = template_pids(), set(worker_pids())
        send()
        check_epoch(loader)
        assert (template_pids(), set(worker_pids())) == ([template], first_workers)
        kill(min(first_workers))
        check_epoch(loader)
        assert (template_pids(), len(set(worker_pids()) & first_workers)) == ([template], 1)
        assert set(received) == {signal.SIGINT, signal.SIGTERM}
        loader.close()
    """)


@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_random_moments_lose_and_repeat_no_sample(run_with_prelude, seed):
    run_with_prelude(f"""
        from gpuload.workers import batch
        batch.SOLO_DEATHS = 100  # chance can kill three workers while each has only the same sample
        generator, kill_count = random.Random({seed}), 0
        check_epoch(loader)
        def kill_processes():
            global kill_count
            deadline = time.monotonic() + LIMIT_S
            while kill_count < 20 and time.monotonic() < deadline:
                time.sleep(generator.expovariate(50))  # seconds, 0.02 in the mean
                pids = template_pids()
                if generator.random() >= 0.25:
                    pids = [pid for template in pids for pid in child_pids(template)]
                with contextlib.suppress(ProcessLookupError, IndexError):  # the process has exited, or there is none
                    os.kill(generator.choice(pids), signal.SIGKILL)
                    kill_count += 1
        killer = threading.Thread(target=kill_processes, daemon=True)
        killer.start()
        while killer.is_alive():
            check_epoch(loader)
        check_epoch(loader)
        assert kill_count == 20
        wait_until(is_steady, "all dead processes are replaced")
        pids = pool().pids
        assert len(pids) == 2
        loader.close()
        wait_until(lambda: all(is_dead(pid) for pid in pids), "the workers have exited")
        assert held_resources()[1] == 0, "child processes remain"
    """)


PID_1 = """
import logging, os, signal, sys, time

assert os.getpid() == 1
pid_read_end, pid_write_end = os.pipe()
go_read_end, go_write_end = os.pipe()
if os.fork() == 0:
    child = os.fork()
    if child == 0:
        os.close(go_write_end)
        os.read(go_read_end, 1)
        os._exit(7)
    os.write(pid_write_end, str(child).encode())
    os._exit(0)
os.wait()
os.close(go_write_end)
orphan = int(os.read(pid_read_end, 20))  # it has become a child of this process, and exits

import gpuload as gl
import torch
from gpuload.workers import fork_server

class Numbers(list):
    def __getitem__(self, index):
        return index

def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]

def child_pids(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]

logging.disable()
while state(orphan) != "Z":
    time.sleep(0.002)
waitid, refused = os.waitid, []
def refuse_at_first(*arguments):  # the kernel closes a process's pipes a moment before its children get a new parent
    if len(refused) < 3:
        refused.append(arguments)
        raise ChildProcessError
    return waitid(*arguments)
os.waitid = refuse_at_first
options = {"num_workers": 2, "device": "cpu", "persistent_workers": True}
loader = gl.Loader(Numbers(range(400)), 4, chunk_size=2, **options)
for _ in range(3):
    batches = iter(loader)
    seen = [next(batches)]
    pool = loader._session.engine
    template = pool._template
    if template.ready:
        os.kill(template.pid, signal.SIGSTOP)  # so that it can no longer reap processes
        os.kill(pool.pids[0], signal.SIGKILL)
        os.kill(template.pid, signal.SIGKILL)
    seen += batches
    assert torch.cat(seen).tolist() == list(range(400))
causes = pool.deaths.causes
loader.close()
fork_server.close()
assert child_pids(1) == [orphan], child_pids(1)
assert os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]) == 7
assert refused
assert [cause for cause in causes if "killed by SIGKILL" not in cause] == []
print("good")
"""


def test_pid_1_of_a_container_reaps_only_the_processes_of_gpuload():
    unshare = shutil.which("unshare")
    if unshare is None:
        lacking.skip("a PID namespace")
    namespace = (unshare, "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    attempt = subprocess.run([*namespace, "true"], capture_output=True, text=True)
    if attempt.returncode:
        lacking.skip("a PID namespace", attempt.stderr.strip())
    command = [*namespace, sys.executable, "-c", PID_1]
    folder = Path(gpuload.__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert (result.stdout, result.stderr, result.returncode) == ("good\n", "", 0)
