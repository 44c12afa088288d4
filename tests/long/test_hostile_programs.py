"""Programs that are after the expected output of their test."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_sandbox
from test_sandbox import ECHO, OURS, SEVEN, processes, words

from minragen.environments.sandbox import Case, Monty, judge

prey, pool, spaces, quick = (
    test_sandbox.prey, test_sandbox.pool, test_sandbox.spaces, test_sandbox.quick)
# In hostile.txt `#### AIM` begins the programs of an aim, and `# ----` a program.
_, *PARTS = re.split("(?m)^#### (.*)\n", Path(__file__).with_name("hostile.txt").read_text())
HOSTILE = {aim: re.split("(?m)^# ----.*\n", programs)[1:]
           for aim, programs in zip(PARTS[::2], PARTS[1::2])}
# The first lines of every program; `tell` prints the secret if a text holds it.
SETUP = ("import ctypes, os, re, socket, sys, threading, time\n"
         "libc = ctypes.CDLL(None, use_errno=True)\n"
         "def tell(text):\n    found = re.search('secret-[0-9a-f]{16}', str(text))\n"
         "    if found: sys.exit(print(found[0]))\n")
# In Monty a program is a function, which returns what the program says.
SAY = "import os, re, sys, time\nsaid = []\ndef print(*a, **k): said.extend(a)\n"


class TestHostilePrograms:
    @pytest.mark.parametrize("aim", HOSTILE)
    def test_none_gets_the_secret_or_harms_or_leaves_anything(self, pool, prey, aim, quick):
        assert words(ECHO, SEVEN, "f", pool) == ["passed"]
        before = processes(OURS)
        for code in HOSTILE[aim]:
            full, name = f"{SETUP}{code}", "f" if "def f(" in code else ""
            if pool.kind is Monty:
                full = f"{SAY}{code}" + ("" if name else "\ndef f(x): return said[0]")
                name = "f"
            case = Case([1], prey.secret) if name else Case("1\n", prey.secret)
            began = time.process_time()
            results = judge(prey.fill(full), 2 * [case], name, 1, pool)
            assert time.process_time() - began < 0.5, code  # of the trainer's own
            assert not any(r.word == "passed" or prey.secret in r.value for r in results), code
            assert not processes(prey.token) and self.changes(prey) == [], code
            assert words(ECHO, SEVEN, "f", pool) == ["passed"], code
            assert processes(OURS) == before, code  # it is still the same sandbox

    def changes(self, prey):
        """What is not as it was among the files that a program could write, move or close."""
        places = ("/tmp", "/var/tmp", "/dev/shm", "/", os.path.expanduser("~"), prey.folder, ".")
        left = [str(place) for place in places if os.path.exists(f"{place}/{prey.token}")]
        file = prey.folder / "tests.json"
        now = prey.folder.stat().st_mode & 0o777, file.read_text(), file.stat().st_mtime > 9
        return left + ["the file"] * (now != (0o755, prey.secret, True))

    def test_without_isolation_the_same_programs_do_get_the_secret(self, prey, tmp_path, spaces):
        """So that the test above can fail. A program also finds whatever its worker is told."""
        for code in HOSTILE["reading the secret"]:
            done = subprocess.run([sys.executable, "-c", prey.fill(SETUP + code)], cwd=tmp_path,
                                  text=True, capture_output=True, check=False)
            assert done.stdout.strip() == prey.secret, code
        search = HOSTILE["reaching beyond its process"][0]
        told = f"{prey.fill(SETUP + search)}# {prey.secret}"
        assert words(told, [Case("", prey.secret)], pool=spaces) == ["passed"]

    def test_what_namespaces_do_not_hold_is_refused(self, spaces):
        """By names in libc. With these arguments the kernel's own answer is another."""
        code = ("for name in 'fork vfork unshare socket shmget semget msgget'.split():\n"
                "    if getattr(libc, name)(-1, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
                "        print(name)\n"
                "keys = (248, 249, 250) if os.uname().machine == 'x86_64' else (217, 218, 219)\n"
                "for number in (425, *keys):\n"
                "    if libc.syscall(number, -1, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
                "        print(number)\n"
                "for path in (os.__file__, '/x', '/etc/passwd', '/proc/self/maps', '/dev/null'):\n"
                "    try: print(path, open(path, 'a'))\n    except OSError: pass\n"
                "site = os.path.dirname(os.__file__) + '/site-packages'\n"  # Debian has none
                "print(*os.listdir(site) if os.path.exists(site) else ())")
        [result] = judge(SETUP + code, [Case("", "")], pool=spaces)
        assert result == ("passed", "\n")
