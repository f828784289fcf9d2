"""Servers whose processes are forked: a start then imports SGLang once, and not three times.

SGLang spawns its scheduler and its detokenizer, and each imports everything anew: most of a start,
where several servers and tests share two cores. The plug-in is then loaded in one process and its
hooks are inherited. It ends at once, too, where SGLang takes seconds to see that nothing runs any
more. test_starts, test_faults and test_bench start servers, and end them, as SGLang does.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.lab.servers import Server

#: SGLang chooses spawn itself, whatever was chosen before.
_CODE = """
import multiprocessing, runpy
choose = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=True)
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


@dataclass
class ForkingServer(Server):
    """A Server, quicker to start and to stop."""

    def command(self) -> list[str]:
        """As Server's; the module is run by a line of code."""
        python, flag, module, *arguments = super().command()
        assert (flag, module) == ("-m", "sglang.launch_server")
        return [python, "-c", _CODE, *arguments]

    def stop(self, grace: float = 0) -> None:
        """As Server's, without time to end by itself."""
        super().stop(grace)
