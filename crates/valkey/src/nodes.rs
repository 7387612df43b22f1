//! The nodes of a cluster: they must not lose what they have acknowledged.

use fathom_failure::Failure;
use fathom_failure::text::foreign;

use crate::client::Client;

/// The oldest version of the nodes.
const VERSION_MIN: u32 = 8;

/// Refuses nodes that would lose what they have acknowledged.
pub(crate) async fn check_nodes(client: &Client, copies: u32) -> Result<(), Failure> {
    for (node, info) in client.nodes().await? {
        check_node(&node, &info, copies)?;
    }
    for (node, policy) in client.policies().await.unwrap_or_default() {
        if policy != "always" {
            let message =
                format!("the node {node} makes writes durable later (appendfsync is {policy})");
            return Err(Failure::new(foreign(&message)).advise("set `appendfsync always`"));
        }
    }
    Ok(())
}

fn check_node(node: &str, info: &str, copies: u32) -> Result<(), Failure> {
    let field = |name: &str| {
        let value =
            |line: &str| Some(line.trim_end().strip_prefix(name)?.strip_prefix(':')?.to_owned());
        info.lines().find_map(value)
    };
    let number = |name: &str| field(name).and_then(|value| value.parse::<u32>().ok()).unwrap_or(0);
    let version = field("valkey_version").unwrap_or_else(|| "unknown".into());
    let major = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    let policy = field("maxmemory_policy").unwrap_or_default();
    let (problem, remedy) = if major < VERSION_MIN {
        (
            format!("has no Valkey of version {VERSION_MIN} (but {version})"),
            "use a newer one".into(),
        )
    } else if number("aof_enabled") != 1 {
        ("has no append-only file".into(), "set `appendonly yes`".into())
    } else if policy != "noeviction" {
        let text = format!("removes keys when it is full (maxmemory-policy is {policy})");
        (text, "set `maxmemory-policy noeviction`".into())
    } else if number("connected_slaves") < copies {
        let replicas = number("connected_slaves");
        (format!("has {replicas} replicas"), format!("add some, or set `copies` below {copies}"))
    } else {
        return Ok(());
    };
    Err(Failure::new(foreign(&format!("the node {node} {problem}"))).advise(remedy))
}
