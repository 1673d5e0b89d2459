"""Two machines: network namespaces of this one with a link between them, and how a run is started there.

They need root on Linux and `ip` of iproute2, and share the disk. A wall clock of its own comes from a small
library in C, for which `cc` is needed.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.runs import CPU, ROOT

# The second: torchrun would hand processes that it starts again the addresses of those before, in its store.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FIRST, PORT = "10.231.77.1", "29500"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]


class Machine:
    """A network namespace, where one side of a run is started."""

    def __init__(self, number):
        self.number, self.name = number, f"dino-vit-{os.getpid()}-{number}"
        self.link, self.address = f"dino-{os.getpid() % 10_000}-{number}", f"10.231.77.{number + 1}"
        self.variables = dict(VARIABLES)

    def start(self, command, log):
        """Start one side of a run, with a host name and a view of the file system of its own."""
        self.log = log
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "--propagation", "private"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        environ = {**os.environ, **self.variables, "GLOO_SOCKET_IFNAME": self.link}
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [*inside, *named], cwd=ROOT, env=environ, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )

    @property
    def ended(self):
        return self.process.poll() is not None

    def pids(self):
        """Return its processes: the launcher, the run and its loader processes."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def send(self, number):
        """Send a signal to all its processes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_process(self):
        """Kill the process of the run, as the system does when memory runs out, and not its launcher."""
        ranks = [pid for pid in self.pids() if b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(min(ranks), signal.SIGKILL)

    def mount(self, *options):
        """Mount something that only this machine sees, until the run there ends."""
        _do("nsenter", "--target", str(self.process.pid), "--mount", "mount", *options)

    def cut(self, state="down"):
        """Take its end of the link down, or up."""
        _ip("-n", self.name, "link", "set", self.link, state)

    def give_clock(self, folder):
        """Give what is started next a wall clock of its own, by a library compiled into the folder."""
        library, self.ahead = folder / "clock.so", folder / f"ahead-{self.number}"
        _do("cc", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("clock.c")))
        self.ahead.write_text("0")
        self.variables |= {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(self.ahead)}

    def jump(self, seconds):
        """Put its wall clock so many seconds ahead of the time, or behind it."""
        assert any("clock.so" in Path(f"/proc/{pid}/maps").read_text() for pid in self.pids())
        self.ahead.write_text(str(seconds))

    @property
    def sentence(self):
        """Return the last that the run said of its end."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("dino-vit pretrain: ")]
        return lines[-1].removeprefix("dino-vit pretrain: ") if lines else "nothing"


def _do(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments):
    return _do("ip", *arguments)


@contextmanager
def two_machines():
    """Make two namespaces with a link between them; end what runs there in the end."""
    machines, made = [Machine(number) for number in range(2)], []
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
            made.append(machine)
        first, second = machines
        _ip("-n", first.name, "link", "add", first.link, "type", "veth", "peer", second.link)
        _ip("-n", first.name, "link", "set", second.link, "netns", second.name)
        for machine in machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.link)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            machine.cut("up")
        yield machines
    finally:
        for machine in made:
            machine.send(signal.SIGKILL)
            _ip("netns", "delete", machine.name)


def accelerate(number):
    """Return how `accelerate launch` starts one side."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CPU)]
    launcher += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(number)]
    return [*launcher, "--main_process_ip", FIRST, "--main_process_port", PORT]


def torchrun(number):
    """Return how torchrun starts one side."""
    return [*TORCHRUN, "--node-rank", str(number), "--master-addr", FIRST, "--master-port", PORT]


def restarting(number):
    """Return how torchrun starts one side, and again when it fails."""
    # The host of the rendezvous, and its address, would follow from names, which mean nothing here.
    host = f"is_host={str(number == 0).lower()}"
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST}:{PORT}", "--rdzv-conf", host]
    where += ["--local-addr", f"10.231.77.{number + 1}"]
    return [*TORCHRUN, *where, "--rdzv-id", "run", "--max-restarts", "3"]
