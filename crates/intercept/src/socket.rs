//! Messages with a descriptor over a Unix socket of packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors of a message.
const DESCRIPTORS_MAX: usize = 2;

/// Sends a message with descriptors, at most two.
///
/// # Errors
/// Those of the socket.
pub fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// The next message of exactly `LENGTH` bytes, with its descriptors; `None` at the end of the
/// connection.
///
/// # Errors
/// Those of the socket, and for a message of another length.
pub fn receive<const LENGTH: usize>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<([u8; LENGTH], Vec<OwnedFd>)>> {
    let mut bytes = [0; LENGTH];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    // The kernel closes descriptors for which there is no room.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut received_files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            received_files.extend(files);
        }
    }
    match received.bytes {
        0 => Ok(None),
        bytes_received if bytes_received == LENGTH => Ok(Some((bytes, received_files))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
