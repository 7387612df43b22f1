//! The part of a connection that other threads use.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use fathom_block::{DiskChange, Wake};
use fathom_guest_memory::{DirtyLog, GuestMemory};
use rustix::net::{SendFlags, send};

use super::private_memory::PrivateMemory;

/// The state of a connection that other threads need: to announce a new size to the VMM, and new
/// layers to the rings.
#[derive(Default)]
pub(super) struct Live {
    pub(super) channel: Option<UnixStream>,
    /// The wake-ups of the rings' threads, by ring.
    pub(super) wakes: Vec<(usize, Arc<Wake>)>,
    /// The guest's current memory, for other parts of the daemon.
    pub memory: GuestMemory,
    pub running_queues: u16,
    pub features: u64,
    pub protocol_features: u64,
    pub inflight: bool,
    pub logging: bool,
    /// The log to write, while the guest is being migrated.
    pub log: Option<Arc<DirtyLog>>,
    /// Whether the guest's writes to its memory reach the daemon.
    pub private_memory: Arc<PrivateMemory>,
}

impl Live {
    /// Announces a change of the disk to the VMM or to the rings.
    pub(super) fn announce(&mut self, change: DiskChange) {
        match change {
            DiskChange::Resized => self.announce_config(),
            DiskChange::Restacked => {
                for (_, wake) in &self.wakes {
                    wake.wake();
                }
            }
        }
    }

    /// Sends `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`: the VMM reads the configuration space again
    /// and notifies the guest.
    fn announce_config(&mut self) {
        const CONFIG_CHANGE: u32 = 2;
        const VERSION: u32 = 1;
        let Some(channel) = &self.channel else { return };
        let mut message = [0; 12];
        message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        // A VMM that does not read must not stop the daemon, whatever flags it gives the socket.
        let sent = send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        if sent != Ok(message.len()) {
            let error = sent.err().map_or(io::ErrorKind::WriteZero.into(), io::Error::from);
            tracing::warn!(%error, "cannot announce the disk's new size to the VMM");
            self.channel = None;
        }
    }
}
