//! Networks between nodes, and between nodes and the client, that are cut and rejoined. Needs root,
//! for namespaces.

mod support;

use std::process::Command;
use std::time::Duration;

use fathom_valkey::local::{LocalCluster, NodePlace};
use support::{beside, cluster, options};

const BRIDGE: &str = "fathom-vk";
const SPACES: usize = 3;

fn run(command: &str) -> bool {
    let mut words = command.split_whitespace();
    let done = Command::new(words.next().unwrap()).args(words).output();
    done.is_ok_and(|done| done.status.success())
}

/// Network namespaces at one bridge; gone when it is dropped.
struct Spaces;

impl Spaces {
    fn new() -> Option<Self> {
        drop(Self);
        let made = run(&format!("ip link add {BRIDGE} type bridge"))
            && run(&format!("ip addr add 10.213.7.1/24 dev {BRIDGE}"))
            && run(&format!("ip link set {BRIDGE} up"))
            && (0..SPACES).all(|space| {
                let (inner, outer) = (format!("fvk-in{space}"), format!("fvk-out{space}"));
                run(&format!("ip netns add {}", Self::name(space)))
                    && run(&format!("ip link add {outer} type veth peer name {inner}"))
                    && run(&format!("ip link set {inner} netns {}", Self::name(space)))
                    && run(&format!("ip link set {outer} master {BRIDGE}"))
                    && run(&format!("ip link set {outer} up"))
                    && Self::within(
                        space,
                        &format!("ip addr add {}/24 dev {inner}", Self::address(space)),
                    )
                    && Self::within(space, &format!("ip link set {inner} up"))
                    && Self::within(space, "ip link set lo up")
            });
        let spaces = Self;
        if !made {
            eprintln!("network namespaces cannot be made: skipped");
            return None;
        }
        Some(spaces)
    }

    fn name(space: usize) -> String {
        format!("fathom-vk{space}")
    }

    fn address(space: usize) -> String {
        format!("10.213.7.{}", 10 + space)
    }

    fn within(space: usize, command: &str) -> bool {
        run(&format!("ip netns exec {} {command}", Self::name(space)))
    }

    fn place(space: usize) -> NodePlace {
        let prefix =
            ["ip", "netns", "exec"].map(str::to_owned).into_iter().chain([Self::name(space)]);
        NodePlace { address: Self::address(space), prefix: prefix.collect() }
    }

    /// Cuts a namespace off from everything, or joins it again.
    fn cut(space: usize, is_cut: bool) {
        let state = if is_cut { "down" } else { "up" };
        assert!(run(&format!("ip link set fvk-out{space} {state}")));
    }

    /// Cuts a namespace off from the other ones, but not from the client; or joins it again.
    fn cut_from_nodes(space: usize, is_cut: bool) {
        let change = if is_cut { "add" } else { "del" };
        for other in (0..SPACES).filter(|other| *other != space) {
            let address = Self::address(other);
            assert!(Self::within(space, &format!("ip route {change} blackhole {address}/32")));
        }
    }
}

impl Drop for Spaces {
    fn drop(&mut self) {
        for space in 0..SPACES {
            run(&format!("ip netns del {}", Self::name(space)));
        }
        run(&format!("ip link del {BRIDGE}"));
    }
}

fn primary_of(cluster: &LocalCluster, space: usize) -> bool {
    (0..cluster.count()).any(|node| node % SPACES == space && cluster.is_primary(node))
}

#[test]
fn networks_that_are_cut_cost_time_and_no_write() {
    let Some(_spaces) = Spaces::new() else { return };
    let started = cluster(|options| options.places = (0..SPACES).map(Spaces::place).collect());
    let Some((_folder, cluster)) = started else { return };
    beside(&options(&cluster), 5, || {
        for round in 0..4 {
            std::thread::sleep(Duration::from_millis(300));
            let space = (0..SPACES).find(|space| primary_of(&cluster, (round + space) % SPACES));
            let space = (round + space.unwrap()) % SPACES;
            let cut = if round % 2 == 0 { Spaces::cut } else { Spaces::cut_from_nodes };
            cut(space, true);
            std::thread::sleep(Duration::from_secs(8));
            cut(space, false);
            cluster.wait_until_ready().unwrap();
        }
    });
}
