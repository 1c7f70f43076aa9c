"""All that the hostile suite has, drawn by chance, against one running system on the small models, with honest clients
beside it: does a process end, does an honest request fail or wait?

Each hostile client has an API key with limits, as an operator gives them, and an address of its own. First the honest
clients are alone. Ends with status 1 if a process ended, a limit of memory was passed, an honest request failed, or one
took 2 s longer than the slowest of its kind before.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.soak import MORE_FILES, at_rest, report
from benchmarks.systems.holdings import Holding
from cli.plan import LaunchOptions, demo_options
from cli.ports import free_ports
from cli.run_files import temporary
from cli.supervisor import Supervisor
from cli.up import running
from gateway.access.api_keys import digest, new_key
from tests.hostile.at_random import crowd
from tests.hostile.at_random.attacker import Target
from tests.hostile.at_random.honest import Asked, Honest
from tests.hostile.at_random.watch import Watch, faults, limit
from tests.hostile.conftest import KEY

ATTACKERS = 8
LATER_S = 2.0  # an honest request may wait longer than before
LIMITS = "max_concurrent_requests: {}\n    requests_per_minute: {}\n    max_realtime_sessions: 8\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of hostile clients (60)")
    parser.add_argument("--without", type=float, default=5, help="minutes without them before (5)")
    parser.add_argument("--clients", type=int, default=8, help="hostile clients at a time, of 8 keys (8)")
    parser.add_argument("--places", type=int, default=1, help="max_concurrent_requests of each hostile key (1)")
    parser.add_argument("--rate", type=int, default=60, help="requests_per_minute of each hostile key (60)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--gateway-gib", type=float, default=2, help="RLIMIT_DATA of the gateway's processes (2)")
    parser.add_argument("--thinker-gib", type=float, default=8, help="of the thinker's (8)")
    parser.add_argument("--logs", type=Path, help="directory that gets all logs; default: none")
    return parser.parse_args()


def options_of(scratch: Path, keys: dict[str, str], limits: str) -> LaunchOptions:
    """Of a system that is open to `keys`, by name; all but "honest" have `limits`."""
    entry = "  - name: {}\n    sha256: '{}'\n    {}"
    entries = [entry.format(name, digest(key), limits if name != "honest" else "\n") for name, key in keys.items()]
    file = scratch / "keys.yaml"
    file.write_text("keys:\n" + "".join(entries))
    directories = [f"--{name}-dir={scratch / name}" for name in ("jobs", "voices", "responses")]
    return demo_options(
        port=free_ports(1)[0],
        run_directory=scratch / "run",
        temporary=scratch,
        api_keys_file=file,
        stage_arguments={"gateway": directories},
    )


def attack(system: Supervisor, keys: list[str], flags: argparse.Namespace, file: Path, honest: Honest) -> crowd.Counts:
    """Returns what came of all, when the hostile clients are gone. Prints each minute how far it is."""
    target = Target(system.url, list(system.addresses.values()), "quartet-demo", {})
    arguments = (target, keys, flags.clients, flags.seed, flags.minutes, file)
    process = multiprocessing.get_context("spawn").Process(target=crowd.run, args=arguments)
    process.start()
    began_s = time.monotonic()
    while process.is_alive():
        process.join(60)
        beside = [each for asked in honest.asked.values() for each in list(asked) if each.at_s >= began_s]
        slowest_s, failed = max((each.took_s for each in beside), default=0.0), sum(bool(each.error) for each in beside)
        minutes = (time.monotonic() - began_s) / 60
        print(
            f"{minutes:.0f} min: {len(beside)} honest requests, {failed} failed, slowest {slowest_s:.2f} s", flush=True
        )
    return json.loads(file.read_text())


def show_counts(counts: crowd.Counts) -> list[str]:
    """Returns what is a fault among them."""
    found = []
    print("\n| kind | sent | what came |\n|---|---|---|")
    for kind, outcomes in sorted(counts.items()):
        cells = ", ".join(f"{outcome[:60]}: {n}" for outcome, n in sorted(outcomes.items(), key=lambda each: -each[1]))
        print(f"| {kind} | {sum(outcomes.values())} | {cells} |")
        found += [f"{kind}: {outcome} ({n} times)" for outcome, n in outcomes.items() if outcome.startswith("500")]
        found += [f"{kind}: {outcome} ({n} times)" for outcome, n in outcomes.items() if "AssertionError" in outcome]
    return found


def show_honest(asked: dict[str, list[Asked]], start_s: float) -> list[str]:
    """`start_s`: when the hostile clients came. Returns what is a fault."""
    found = []
    print("\n| honest | without: n, p50, p99, worst | with: n, failed, p50, p99, worst |\n|---|---|---|")
    for kind, all_of_it in asked.items():
        without = [each for each in all_of_it if each.at_s + each.took_s < start_s]
        beside = [each for each in all_of_it if each.at_s + each.took_s >= start_s]
        failed = [each for each in beside if each.error]
        figures = [np.percentile([each.took_s for each in part] or [0], [50, 99, 100]) for part in (without, beside)]
        cells = [", ".join(f"{figure:.2f}" for figure in each) for each in figures]
        print(f"| {kind} | {len(without)}, {cells[0]} s | {len(beside)}, {len(failed)}, {cells[1]} s |")
        found += [f"{kind}, alone: {each.error}" for each in without if each.error]
        found += [f"{kind}, {each.at_s - start_s:.0f} s after the begin: {each.error}" for each in failed]
        late = [each for each in beside if each.took_s > figures[0][2] + LATER_S]
        found += [f"{kind}, {each.at_s - start_s:.0f} s after the begin: {each.took_s:.1f} s" for each in late]
    return found


def show_memory(
    watch: Watch, most_bytes: dict[str, int], before: dict[str, Holding], after: dict[str, Holding]
) -> list[str]:
    """Returns what is a fault."""
    found = [f"ended: {each}" for each in watch.ended]
    print("\n| | most memory |\n|---|---|")
    for name, peak in watch.peaks.items():
        print(f"| {name} | {peak / 2**20:.0f} MiB |")
        if peak > most_bytes.get(name, peak):
            found.append(f"{name} had {peak / 2**20:.0f} MiB")
    print(f"\n/health took {watch.waited_s:.2f} s at most; the loop computed for {watch.held_s:.2f} s of one at most\n")
    report(before, after)
    for name, holding in after.items():
        if holding.files > before[name].files + MORE_FILES:
            found.append(f"{name}: {holding.files} open files, before {before[name].files}")
    return found


def main() -> None:
    flags = parse()
    most_bytes = {"gateway": int(flags.gateway_gib * 2**30), "thinker": int(flags.thinker_gib * 2**30)}
    scratch = temporary("quartet-hostile-")
    keys = {"mallory": KEY} | {f"mallory{number}": new_key() for number in range(2, ATTACKERS + 1)}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        honest_key = new_key()
        options = options_of(scratch, keys | {"honest": honest_key}, LIMITS.format(flags.places, flags.rate))
        system = stack.enter_context(running(options))
        if flags.logs:
            stack.callback(shutil.copytree, system.run_directory, flags.logs, dirs_exist_ok=True)
        limit(system.run_directory, most_bytes)
        found: list[str] = []
        honest, watch = Honest(system.url, honest_key), Watch(system.url, system.run_directory)
        honest.start()
        time.sleep(60 * flags.without)
        before = asyncio.run(at_rest(system.run_directory, []))
        watch.start()
        start_s = time.monotonic()
        counts = attack(system, list(keys.values()), flags, scratch / "counts.json", honest)
        watch.stop()
        honest.stop()
        after = asyncio.run(at_rest(system.run_directory, found))
        logged = faults(system.run_directory)
    found += show_counts(counts) + show_honest(honest.asked, start_s)
    found += show_memory(watch, most_bytes, before, after)
    print("\nerrors in the logs:", ", ".join(f"{name} {count}" for name, count in logged.items()))
    print(
        f"seed {flags.seed}, {flags.minutes:g} minutes, {sum(sum(each.values()) for each in counts.values())} attacks"
    )
    print("\n".join(found) or "nothing ended, failed or waited")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
