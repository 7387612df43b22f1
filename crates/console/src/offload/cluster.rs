//! `fathom offload cluster` and `forget`: a small Valkey cluster of this host, and volumes in
//! clusters.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use fathom_valkey::local::{LocalCluster, LocalOptions};

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{self, Format, text::clean},
    process::catch_signals,
};

/// The time between two looks at the signals.
const INTERVAL: Duration = Duration::from_millis(200);

/// Options of `fathom offload cluster`.
#[derive(Debug, Args)]
#[command(after_help = "\
For trials and tests: all nodes are on this host, so that nothing outlives it. The nodes listen on the loopback
address. They end with this command, and start again with their content if the folder is given again. It needs
the package valkey-server (version 8 or newer).

Example:
  fathom offload cluster /var/tmp/peaks     prints the table [[cluster]] for the configuration")]
pub struct ClusterCommand {
    /// The folder of the nodes' files
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// The number of primaries
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(3..=32))]
    primaries: u16,
    /// The replicas of its primary that have each write when it completes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=4))]
    copies: u16,
    /// The replicas of each primary; by default one more than copies, so that writes go on without
    /// any one node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=5))]
    replicas: Option<u16>,
}

/// Options of `fathom offload forget`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fathom offload forget peaks/host1-web --force     the log of a disk that is never served again")]
pub struct ForgetOptions {
    /// The cluster's name and the volume's
    #[arg(value_name = "CLUSTER/VOLUME")]
    volume: String,
    /// Do it: changes in the volume that are not at home are lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Runs a cluster until a signal.
pub fn run(options: &ClusterCommand) -> CommandResult {
    let signalled = catch_signals(false)
        .map_err(|error| Failure::new(format!("cannot watch for signals: {error}")))?;
    let folder = std::path::absolute(&options.folder).unwrap_or_else(|_| options.folder.clone());
    let replicas = options.replicas.unwrap_or(options.copies + 1);
    if replicas < options.copies {
        let text = format!("{replicas} replicas cannot have {} copies", options.copies);
        return Err(Failure::new(text).advise("choose at least as many replicas as copies"));
    }
    let wanted = LocalOptions {
        primaries: options.primaries,
        copies: replicas,
        ..LocalOptions::new(&folder)
    };
    note!("Starting the nodes in {}.", folder.display());
    let cluster = LocalCluster::start(&wanted).map_err(fathom_failure::Failure::from)?;
    // A cluster that is started again has its own number.
    let copies = options.copies.min(cluster.copies());
    output::text_line(&table(&cluster.addresses(), copies))?;
    if cluster.copies() == copies {
        note!(
            "Once a node has ended, writes of its slots wait, and fail after 30 s, until it runs again: choose \
             more --replicas than --copies, in another folder, for a cluster that goes on without any one node."
        );
    }
    note!("The cluster runs until this command ends (Ctrl-C).");
    while !signalled.load(Ordering::Relaxed) {
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// The table for a configuration.
fn table(nodes: &[String], copies: u16) -> String {
    format!(
        "[[cluster]]\nname = \"local\"\nnodes = {nodes:?}\nplain_allowed = true    # on the loopback address\n\
         copies = {copies}"
    )
}

/// Removes a volume.
pub fn forget(options: &ForgetOptions) -> CommandResult {
    let Some((cluster, volume)) = options.volume.split_once('/') else {
        let text = format!("{:?} is not the place of a volume", clean(&options.volume));
        return Err(Failure::new(text).advise("write it like peaks/host1-web"));
    };
    if !options.force {
        let text =
            format!("changes in {} that are not at home would be lost", clean(&options.volume));
        return Err(Failure::new(text).advise("run the command again with `--force`"));
    }
    let done = options.control.client().forget_volume(cluster, volume)?;
    if options.format.json {
        return output::json(&done);
    }
    output::text_line(&clean(&done.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_all_nodes() {
        let text = table(&["127.0.0.1:7000".into(), "127.0.0.1:7001".into()], 1);
        assert!(text.contains("nodes = [\"127.0.0.1:7000\", \"127.0.0.1:7001\"]"), "{text}");
    }
}
