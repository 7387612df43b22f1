//! Peeks at the next message, to copy a descriptor that it carries.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_BACKEND_REQ_FD: u32 = 21;
/// The length of a message's header, in bytes.
const HEADER_LENGTH: usize = 12;
/// Room for the descriptors of the largest message; a cut list would lose descriptors.
const DESCRIPTORS_MAX: usize = 32;

/// Waits for the next message on `socket` and leaves it there. Returns the channel for the daemon's
/// own messages if the message hands one over.
pub(super) fn channel(socket: impl AsFd) -> io::Result<Option<UnixStream>> {
    let mut header = [0_u8; HEADER_LENGTH];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut header)];
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, parts, &mut control, flags)?;
    // A peek copies the message's descriptors: each has to be received, or it stays open for ever.
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    let [a, b, c, d, ..] = header;
    let wanted =
        message.bytes == HEADER_LENGTH && u32::from_ne_bytes([a, b, c, d]) == SET_BACKEND_REQ_FD;
    Ok(descriptors.pop().filter(|_| wanted && descriptors.is_empty()).map(UnixStream::from))
}
