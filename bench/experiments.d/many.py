"""Experiment 6: many hosts and a centre, each in a network namespace of its own."""

import os
import shutil
import subprocess
import time

from figures import Report, each, points, ratio
from host import events_per_second
from link import bytes_per_event, finish, sent
from queries import counter, paper, query_10m
from rig import (
    PREFIX, Centre, Daemon, Failed, Load, Rig, interval, left_behind, load_seconds, note, rounds)

# A host has 32 requests in flight, which complete together: 1,000 requests a second, so that two
# cores can run 27 hosts.
DISK = 'layers = [{ kind = "delay", time = "32ms" }]'
DEPTH = 32
SPACES = "/run/netns"
PORT = 10810


def ip(*arguments, commands=None):
    """Runs `ip`, with commands for `-batch -` if given."""
    ran = subprocess.run(["ip", *arguments], input=commands, capture_output=True, text=True,
                         check=False)
    if ran.returncode:
        raise Failed(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")


def remove(names):
    """Deletes namespaces with their contents."""
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Network:
    """A namespace with a bridge for the centre, and one namespace for each host, connected to the
    bridge. The machine's own network is not changed."""

    def __init__(self, hosts):
        self.hosts, self.made = hosts, []

    def centre(self):
        return f"{PREFIX}{os.getpid()}-centre"

    def host(self, number):
        return f"{PREFIX}{os.getpid()}-{number}"

    def add(self, name):
        self.made.append(name)
        ip("netns", "add", name)

    def __enter__(self):
        remove(left_behind(SPACES))
        try:
            centre = self.centre()
            self.add(centre)
            ip("-n", centre, "-batch", "-", commands=(
                "link set lo up\nlink add hosts type bridge forward_delay 0\n"
                "address add 10.87.0.1/16 dev hosts\nlink set hosts up\n"))
            for number in range(1, self.hosts + 1):
                host = self.host(number)
                self.add(host)
                ip("-n", centre, "-batch", "-", commands=(
                    f"link add h{number} type veth peer name eth0 netns {host}\n"
                    f"link set h{number} master hosts up\n"))
                ip("-n", host, "-batch", "-", commands=(
                    f"address add 10.87.{1 + number // 250}.{1 + number % 250}/16 dev eth0\n"
                    "link set lo up\nlink set eth0 up\n"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        remove(self.made)


def measure(options, network, count, script):
    """Measures `count` hosts under load."""
    with Rig() as rig:
        address = f"10.87.0.1:{PORT}"
        centre = Centre(rig, script, address, network.centre())
        servers = [Daemon(rig, f"host{number}", DISK, address, f"vm{number}", network.host(number))
                   for number in range(1, count + 1)]
        for server in servers:
            server.wait_for_centre()
        # The loads start one after the other.
        loads = [Load(rig, server, DEPTH, load_seconds(options) + count * 0.1, f"load{number}",
                      namespace=network.host(number))
                 for number, server in enumerate(servers, 1)]

        def grown():
            counts = [sent(server) for server in servers]
            return {"events": sum(host["seen"] for host in counts),
                    "bytes": sum(host["bytes"] for host in counts)}

        sample = interval(options, [centre, *servers], loads, grown)
        # Measured while the loads run. The normal lag of a host is some tens of milliseconds.
        sample["lag_ms"] = centre.lag_ms()
        sample["requests_per_second"] = sum(load.requests_per_second() for load in loads)
        sample["cpu"] = {"centre": sample["cpu"]["centre"], "hosts": sum(
            part for name, part in sample["cpu"].items() if name != "centre")}
        connected = len(centre.hosts())
        sample |= finish(centre, servers, time.time_ns())
        if not sample["check"] and connected != count:
            sample["check"] = f"{connected} of {count} hosts are connected to the centre"
        return sample


def centre(sample):
    return sample["cpu"]["centre"]


def us_per_event(sample):
    return centre(sample) * 1e4 * sample["seconds"] / sample["grown"]["events"]


def why_not():
    if os.geteuid():
        return "only root can make network namespaces"
    if not shutil.which("ip"):
        return "the command ip (iproute2) is missing"
    try:
        # Root in a container may lack rights for the network.
        with Network(1):
            return None
    except Failed as failed:
        return f"network namespaces cannot be made: {failed}"


def six(options):
    report = Report(6, "many hosts")
    why = why_not()
    if why:
        report.say(f"SKIPPED: {why}")
        return report
    scripts = {"Query 0": counter() + paper("00"), "Query 10M": counter() + query_10m()}
    counts = sorted(set(options.hosts))
    ways = {f"{name}, {count} hosts": (name, count) for name in scripts for count in counts}
    # The paper's figures for Query 10M by number of hosts. The last host had only one machine.
    figures = {1: 10.0, 2: 20.0, 3: 27.0}
    note("making network namespaces")
    with Network(max(counts)) as network:
        samples = rounds(options, ways, lambda name: measure(
            options, network, ways[name][1], scripts[ways[name][0]]))
    rows = []
    for name, sampled in samples.items():
        script, count = ways[name]
        rows.append([
            name, each(sampled, events_per_second).text(0), each(sampled, centre).text(),
            points(figures.get(count)) if script == "Query 10M" else "",
            each(sampled, us_per_event).text(3),
            ratio(sampled, samples[f"{script}, {counts[0]} hosts"], us_per_event).text(unit=" ×"),
            each(sampled, lambda sample: sample["cpu"]["hosts"]).text(1),
            each(sampled, bytes_per_event).text(1),
            f"{max(sample['lag_ms'] for sample in sampled):,.0f}",
            f"{sum(sample['missing'] for sample in sampled):,}",
            f"{sum(sample['rows'] for sample in sampled):,}"])
    report.table(["", "events/s", "centre", "paper", "µs/event", "to fewest", "hosts' CPU",
                  "bytes/event", "lag ms", "missing", "rows"], rows)
    report.say("the centre's CPU time is in per cent of a core; the paper's core had 2 GHz. Queries "
               "are split: for Query 10M hosts send some columns, for Query 0 all")
    for script in scripts:
        most, fewest = (samples[f"{script}, {count} hosts"] for count in (counts[-1], counts[0]))
        if counts[-1] > counts[0]:
            growth = ratio(most, fewest, us_per_event)
            report.aim(f"{script}: linear: with {counts[-1]} hosts an event costs the centre at most "
                       f"1.1 times that with {counts[0]}", growth, 1.1, " ×")
        lost = each(most, lambda sample: sample["missing"])
        report.aim(f"{script}: no event of {counts[-1]} hosts is missing", lost, 0)
    report.check(samples)
    report.data = {"samples": samples}
    return report
