//! A look at the next message, to take a copy of a descriptor that it carries.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_BACKEND_REQ_FD: u32 = 21;
/// The length of a message's header, in bytes.
const HEADER_LENGTH: usize = 12;
/// Room for the descriptors of the largest message; a cut list would lose descriptors.
const DESCRIPTORS_MAX: usize = 32;

/// Waits for the next message on `socket` and leaves it there. Returns the channel that it hands
/// over, if it is of that kind.
pub(super) fn channel(socket: RawFd) -> io::Result<Option<UnixStream>> {
    let mut header = [0_u8; HEADER_LENGTH];
    // SAFETY: both are plain arithmetic on a length.
    let space = unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) };
    let mut control = vec![0_u64; (space as usize).div_ceil(8)];
    let mut part = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() };
    // SAFETY: an all-zero msghdr is a valid value of that plain structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = space as usize;
    let flags = libc::MSG_PEEK | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message names memory that lives through the call, with its right lengths.
    let count = unsafe { libc::recvmsg(socket, &raw mut message, flags) };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    // A look at a message copies its descriptors: each has to be taken, or it stays open for ever.
    let mut descriptors = descriptors(&message);
    let [a, b, c, d, ..] = header;
    let wanted =
        count as usize == HEADER_LENGTH && u32::from_ne_bytes([a, b, c, d]) == SET_BACKEND_REQ_FD;
    Ok(descriptors.pop().filter(|_| wanted && descriptors.is_empty()).map(UnixStream::from))
}

/// Takes the descriptors that arrived with `message`.
fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut taken = Vec::new();
    // SAFETY: the message was filled in by the kernel, and its memory is still there.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !control.is_null() {
        // SAFETY: the kernel wrote a whole header there.
        let header = unsafe { control.read_unaligned() };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: plain arithmetic on a length.
            let empty = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (header.cmsg_len as usize).saturating_sub(empty) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: the data holds `count` descriptors, new in this process and ours alone.
                let descriptor = unsafe {
                    let place = libc::CMSG_DATA(control).add(index * size_of::<RawFd>());
                    let bytes = place.cast::<[u8; size_of::<RawFd>()]>().read();
                    OwnedFd::from_raw_fd(RawFd::from_ne_bytes(bytes))
                };
                taken.push(descriptor);
            }
        }
        // SAFETY: as for the first.
        control = unsafe { libc::CMSG_NXTHDR(message, control) };
    }
    taken
}
