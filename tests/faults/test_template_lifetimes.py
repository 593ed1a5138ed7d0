"""Who dies with whom: the program, the template that workers are forked from, and the workers; and nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import lacking

import gpuload

LIMIT_S = 120.0

# What several of the programs below begin with.
TEAM = """
    import logging
    logging.disable()
    def pool():
        return loader._session.engine
    def is_steady():
        pool().collect_events(0.0)
        return pool().is_steady and len(templates()) == 1 and pool()._template.ready
    def state(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return "gone"
    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pool().collect_events(0.0) or (state(pid) in "gone" and is_steady()), "there is another")
    loader = number_loader(persistent_workers=True, faults=gl.Faults(max_restarts=10**6))
    def check_epoch():
        assert torch.cat(list(loader)).tolist() == list(range(40))
"""


def team(code: str) -> str:
    return textwrap.dedent(TEAM) + textwrap.dedent(code)


def test_stopped_workers_template_and_fork_server_end_when_the_program_is_killed(start):
    program = start(
        team("""
        check_epoch()
        for pid in (*workers(), *templates(), *servers()):
            os.kill(pid, signal.SIGSTOP)
        say("here")
        time.sleep(1000)
    """)
    )
    program.wait_for_line("here")
    assert len(program.processes()) == 4  # workers, template and fork server
    os.kill(program.pid, signal.SIGKILL)
    assert program.end(within_s=1) == (-signal.SIGKILL, "")


def test_a_worker_holds_only_its_own_pipe_ends_and_dies_alone(succeed):
    succeed(
        team("""
        def pipes(pid):
            ends = {}
            for name in os.listdir(f"/proc/{pid}/fd"):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                assert "pidfd" not in link or pid in templates(), (pid, link)
                if link.startswith("pipe:"):
                    info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                    flags = int(info.split("flags:")[1].split()[0], 8)
                    ends[link] = "write" if flags & os.O_ACCMODE == os.O_WRONLY else "read"
            return ends
        check_epoch()
        [template] = templates()
        for _ in range(3):
            others = set(workers())
            victim = others.pop()
            kill(victim)
            assert others <= set(workers()) and len(workers()) == 2
            assert templates() == [template]
            held = [pipes(pid) for pid in (template, *workers())]
            assert sum(map(len, held)) == len(set().union(*held))  # no two have an end of the same one
            assert sorted(held[0].values()) == ["read", "write", "write"]  # its lifeline, and where it writes statuses
            assert [list(each.values()) for each in held[1:]] == [["read"], ["read"]]
        check_epoch()
        loader.close()
    """)
    )


def test_many_deaths_leave_no_descriptor_and_no_zombie(succeed):
    succeed(
        team("""
        def open_counts():
            return len(os.listdir("/proc/self/fd")), [len(os.listdir(f"/proc/{pid}/fd")) for pid in templates()]
        def zombies():
            return [pid for one in ("self", *templates()) for pid in children(one) if state(pid) == "Z"]
        check_epoch()
        before = open_counts()
        for _ in range(50):
            kill(pool().pids[0])
            assert (open_counts(), zombies()) == (before, [])
        team = set(pool().pids)
        for number in range(10):
            kill(templates()[0])
            assert open_counts()[0] == before[0]
            assert zombies() == []
            assert children() == servers()  # the workers of one that was killed are not given to this process
            if number == 5:  # from a template that none of the others came from
                kill(pool().pids[0])
        assert len(team & set(pool().pids)) == 1
        check_epoch()
        loader.close()
        assert held_resources()[1] == 0
    """)
    )


def test_a_worker_that_is_killed_as_soon_as_it_is_forked_is_replaced(succeed):
    succeed(
        team("""
        accept, forks = process.WorkerProcess.accept, []
        def accept_and_kill(self, *answer):
            error = accept(self, *answer)
            forks.append(self.pid)
            if len(forks) <= 20:
                os.kill(self.pid, signal.SIGKILL)
            if len(forks) in (4, 12, 19):  # reaped, too, before this process has done anything with it
                wait_until(lambda: state(self.pid) == "gone", "it is gone")
            return error
        process.WorkerProcess.accept = accept_and_kill
        before = held_resources()
        check_epoch()
        assert len(forks) == 22
        causes = pool().deaths.causes  # some have had the time to take a chunk
        assert len(causes) == 20 and all(cause.startswith("killed by SIGKILL") for cause in causes), causes
        loader.close()
        assert held_resources() == before
    """)
    )


def test_a_worker_is_used_although_its_template_died_after_the_fork(succeed):
    succeed(
        team("""
        accept, accepted = process.WorkerProcess.accept, []
        def accept_when_the_template_is_dead(self, *answer):
            if not accepted:
                [template] = templates()
                os.kill(template, signal.SIGKILL)
                wait_until(lambda: state(template) in ("gone", "Z"), "it is dead")
            accepted.append(self)
            return accept(self, *answer)
        process.WorkerProcess.accept = accept_when_the_template_is_dead
        before = held_resources()
        check_epoch()
        assert accepted[0].pid in pool().pids
        assert pool().deaths.causes == ["killed by SIGKILL"]
        loader.close()
        assert held_resources() == before
    """)
    )


@pytest.mark.parametrize("timeout", [0.5, 0])
def test_a_stopped_template_delays_no_sample_and_is_replaced(succeed, timeout):
    """After the timeout, or after 30 seconds, here one."""
    succeed(
        team(f"""
        from collections import Counter
        pool_module = sys.modules["gpuload.workers.pool"]
        pool_module.FORK_LIMIT_S = 1.0
        def die(index):  # each worker, once
            if index in (17, 29) and not os.path.exists(f"{{tmp}}/{{index}}"):
                open(f"{{tmp}}/{{index}}", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        loader = number_loader(die, timeout={timeout}, faults=gl.Faults(max_restarts=10**6))
        before = held_resources()
        batches = iter(loader)
        seen = [next(batches)]
        [first] = templates()
        os.kill(first, signal.SIGSTOP)
        collections = Counter()
        collect_events = pool_module.WorkerPool.collect_events
        def collect_and_count(self, timeout_s):
            collections[any(worker.pid is None for worker in self._team.values())] += 1
            return collect_events(self, min(timeout_s, 0.05))
        pool_module.WorkerPool.collect_events = collect_and_count
        seen += batches
        assert sorted(torch.cat(seen).tolist()) == list(range(40)), seen
        assert collections[True], collections  # it did not wait for the template
        limit = {timeout or 1}
        assert f"it did not fork a process for {{limit:g}} seconds" in pool().deaths.causes, pool().deaths.causes
        assert templates() != [first]
        loader.close()
        assert held_resources() == before
    """)
    )


def test_close_ends_a_stopped_template_and_its_workers(succeed):
    succeed(
        team("""
        before = held_resources()
        batches = iter(loader)
        next(batches)
        [template] = templates()
        os.kill(template, signal.SIGSTOP)
        os.kill(pool().pids[0], signal.SIGKILL)
        wait_until(lambda: pool().collect_events(0.0) or len(pool().pids) == 1, "a worker is pending")
        assert len(pool()._team) == 2
        loader.close()  # before its limit, KILL_WAIT_S
        assert state(template) in ("gone", "Z")
        assert held_resources() == before
    """)
    )


def test_worker_error_says_why_a_worker_cannot_be_forked(succeed):
    succeed("""
        class Data(Numbers):
            def __setstate__(self, state):
                vars(self).update(state)
                if "server" in Path("/proc/self/cmdline").read_text():
                    def fork():
                        raise OSError(11, "Resource temporarily unavailable")
                    os.fork = fork
        warnings.simplefilter("ignore", RuntimeWarning)  # about the worker that was the first to fail
        before = held_resources()
        loader = gl.Loader(Data(), 4, num_workers=2, device="cpu")
        try:
            next(iter(loader))
            raise AssertionError
        except gl.WorkerError as error:
            assert re.match("worker [01] could not be forked", str(error)), error
            assert "Resource temporarily unavailable" in str(error), error
        loader.close()
        assert held_resources() == before
    """)


def test_signals_to_the_process_group_reach_the_program_alone(succeed):
    succeed(
        team("""
        heard = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: heard.append(number))
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
        check_epoch()
        [template], first = templates(), set(workers())
        send()
        check_epoch()
        assert (templates(), set(workers())) == ([template], first)
        kill(min(first))
        check_epoch()
        assert (templates(), len(set(workers()) & first)) == ([template], 1)
        assert set(heard) == {signal.SIGINT, signal.SIGTERM}
        loader.close()
    """)
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_random_moments_lose_and_repeat_no_sample(succeed, seed):
    succeed(
        team(f"""
        from gpuload.workers import batch
        batch.DEATHS_ALONE = 100  # as it happens, a sample is alone with a worker that is killed three times
        generator, killed = random.Random({seed}), []
        check_epoch()
        def kill_some():
            deadline = time.monotonic() + LIMIT_S
            while len(killed) < 20 and time.monotonic() < deadline:
                time.sleep(generator.expovariate(50))  # seconds, 0.02 in the mean
                made = templates()
                among = made if generator.random() < 0.25 else [pid for one in made for pid in children(one)]
                with contextlib.suppress(ProcessLookupError, IndexError):  # it has gone, or there is none
                    os.kill(generator.choice(among), signal.SIGKILL)
                    killed.append(among)
        killer = threading.Thread(target=kill_some, daemon=True)
        killer.start()
        while killer.is_alive():
            check_epoch()
        check_epoch()
        assert len(killed) == 20
        wait_until(is_steady, "all that died was replaced")
        team = pool().pids
        assert len(team) == 2
        loader.close()
        wait_until(lambda: all(state(pid) in ("gone", "Z") for pid in team), "they have ended")
        assert held_resources()[1] == 0
    """)
    )


FIRST_OF_ALL = """
import logging, os, signal, sys, time

assert os.getpid() == 1
told, tells = os.pipe()
waits, go = os.pipe()
if os.fork() == 0:
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(waits, 1)
        os._exit(7)
    os.write(tells, str(child).encode())
    os._exit(0)
os.wait()
os.close(go)
orphan = int(os.read(told, 20))  # it is this process's child by now, and ends

import gpuload as gl
import torch
from gpuload.workers import fork_server

class Numbers(list):
    def __getitem__(self, index):
        return index

def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]

def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]

logging.disable()
while state(orphan) != "Z":
    time.sleep(0.002)
waitid, refused = os.waitid, []
def later(*arguments):  # the kernel closes a process's pipes a moment before it gives its children away
    if len(refused) < 3:
        refused.append(arguments)
        raise ChildProcessError
    return waitid(*arguments)
os.waitid = later
options = {"num_workers": 2, "device": "cpu", "persistent_workers": True}
loader = gl.Loader(Numbers(range(400)), 4, chunk_size=2, **options)
for _ in range(3):
    batches = iter(loader)
    seen = [next(batches)]
    pool = loader._session.engine
    template = pool._template
    if template.ready:
        os.kill(template.pid, signal.SIGSTOP)  # it reaps nobody any more
        os.kill(pool.pids[0], signal.SIGKILL)
        os.kill(template.pid, signal.SIGKILL)
    seen += batches
    assert torch.cat(seen).tolist() == list(range(400))
causes = pool.deaths.causes
loader.close()
fork_server.close()
assert children(1) == [orphan], children(1)
assert os.waitpid(orphan, 0) == (orphan, 7 << 8)
assert refused
assert all("killed by SIGKILL" in cause for cause in causes), causes
print("good")
"""


def test_pid_1_of_a_container_reaps_only_the_processes_of_gpuload():
    unshare = shutil.which("unshare")
    if unshare is None:
        lacking.skip("a PID namespace")
    space = (unshare, "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    tried = subprocess.run([*space, "true"], capture_output=True, text=True)
    if tried.returncode:
        lacking.skip("a PID namespace", tried.stderr.strip())
    command = [*space, sys.executable, "-c", FIRST_OF_ALL]
    folder = Path(gpuload.__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert (done.stdout, done.stderr, done.returncode) == ("good\n", "", 0)
