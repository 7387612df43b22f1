//! The address of the running daemon.
use std::path::PathBuf;

use clap::Args;
use fathom_control::{Client, SOCKET_DEFAULT, SOCKET_VARIABLE as VARIABLE};

const CONTROL_HELP: &str =
    "The daemon's control socket [default: $FATHOM_CONTROL, or /run/fathom/control.sock]";

/// How to reach the daemon.
#[derive(Clone, Debug, Default, Args)]
pub struct ControlOptions {
    #[arg(long, value_name = "SOCKET", help = CONTROL_HELP)]
    control: Option<PathBuf>,
}

impl ControlOptions {
    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.control
            .clone()
            .or_else(|| std::env::var_os(VARIABLE).filter(|s| !s.is_empty()).map(PathBuf::from))
            .unwrap_or_else(|| SOCKET_DEFAULT.into())
    }

    /// Whether the user named the socket.
    pub fn is_named(&self) -> bool {
        self.control.is_some() || std::env::var_os(VARIABLE).is_some()
    }

    /// A client for the control socket.
    pub fn client(&self) -> Client {
        Client::new(self.socket())
    }
}
