//! Why a VMM is disconnected, in the operator's terms.

use std::io;

use vhost::vhost_user::Error;

/// The remedy for a guest whose memory the daemon cannot see.
const SHARE: &str = "start QEMU with `-object memory-backend-memfd,id=mem,size=SIZE,share=on \
                     -machine memory-backend=mem`; with libvirt add `<memoryBacking><source \
                     type='memfd'/><access mode='shared'/></memoryBacking>`";

/// Why a VMM was disconnected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One sentence.
    pub message: String,
    /// The remedy; may be empty.
    pub remedy: String,
    /// Whether the VMM has violated the protocol.
    pub is_protocol_error: bool,
}

impl Refusal {
    /// For a guest that is served, but whose VMM has mapped the memory that it hands over
    /// privately.
    pub fn of_private_memory() -> Self {
        let message = "the guest's memory is not shared with the daemon: it uses its disk, but \
                       nothing that it writes to its memory arrives";
        Self { message: message.into(), remedy: SHARE.into(), is_protocol_error: false }
    }
}

/// The meaning of `error`, which comes from the protocol library or the session.
pub(super) fn refusal(error: &Error) -> Refusal {
    let of_host = |message: String, remedy: &str| Refusal {
        message,
        remedy: remedy.to_owned(),
        is_protocol_error: false,
    };
    let of_vmm =
        |message: String| Refusal { message, remedy: String::new(), is_protocol_error: true };
    match error {
        Error::ReqHandlerError(error) if is_shortage(error) => of_host(
            format!("the daemon has no descriptors or memory left: {error}"),
            "raise LimitNOFILE= of its unit, or serve fewer guests",
        ),
        Error::ReqHandlerError(error) if error.kind() == io::ErrorKind::ResourceBusy => of_host(
            error.to_string(),
            "stop that guest first: two guests would destroy each other's files",
        ),
        // QEMU omits memory that is not shared from its table, so the first ring lies in no region;
        // or it sends no descriptors at all.
        Error::ReqHandlerError(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            of_host(format!("the guest's memory is not shared with the daemon ({error})"), SHARE)
        }
        Error::IncorrectFds => {
            of_host("the guest's memory is not shared with the daemon".to_owned(), SHARE)
        }
        Error::ReqHandlerError(error) => of_vmm(error.to_string()),
        error => of_vmm(format!("it broke the vhost-user protocol: {error}")),
    }
}

fn is_shortage(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(code, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_that_the_vmm_did_not_cause_are_no_protocol_errors() {
        let of = |error: io::Error| refusal(&Error::ReqHandlerError(error));
        let shortage = of(io::Error::from_raw_os_error(libc::EMFILE));
        assert!(!shortage.is_protocol_error && shortage.remedy.contains("LimitNOFILE"));
        let text = "another VMM's guest is running on this disk";
        let busy = of(io::Error::new(io::ErrorKind::ResourceBusy, text));
        assert!(!busy.is_protocol_error && busy.message.starts_with(text), "{}", busy.message);
        let nowhere = of(io::Error::new(io::ErrorKind::AddrNotAvailable, "queue 0: nowhere"));
        for private in [refusal(&Error::IncorrectFds), nowhere] {
            assert!(
                private.remedy.contains("share=on") && private.remedy.contains("mode='shared'")
            );
            assert!(!private.is_protocol_error);
        }
        let broken = refusal(&Error::InvalidMessage);
        assert!(broken.is_protocol_error && broken.message.contains("broke"), "{}", broken.message);
    }
}
