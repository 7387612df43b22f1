//! The store of file descriptors of systemd.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;

use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};

/// The service manager, which keeps descriptors for this service.
pub(super) struct Manager {
    address: SocketAddrUnix,
}

impl Manager {
    /// The manager of this process, if it keeps descriptors: the number of places is in `FDSTORE`.
    pub(super) fn new() -> Option<Self> {
        let places: u32 = std::env::var("FDSTORE").ok()?.parse().ok()?;
        let socket: OsString = std::env::var_os("NOTIFY_SOCKET")?;
        let bytes = socket.as_bytes();
        let address = match bytes.strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name),
            None => SocketAddrUnix::new(bytes),
        };
        address.ok().filter(|_| places > 0 && !bytes.is_empty()).map(|address| Self { address })
    }

    pub(super) fn keep(&self, name: &str, file: &File) -> io::Result<()> {
        // A file cannot be polled, and what it is must not matter.
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), Some(file))
    }

    pub(super) fn release(&self, name: &str) {
        if let Err(error) = self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None) {
            tracing::warn!(%error, "the service manager cannot be notified");
        }
    }

    fn send(&self, text: &str, file: Option<&File>) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(super::link::TIME_MAX))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = file.map(|file| [file.as_fd()]);
        if let Some(descriptors) = &descriptors {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let text = [IoSlice::new(text.as_bytes())];
        sendmsg_addr(&socket, &self.address, &text, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
