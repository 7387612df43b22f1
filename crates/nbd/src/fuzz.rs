//! Reads arbitrary bytes of a server: for the fuzzer, and for tests with seeded inputs.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Flags, Operation};
use tokio::time::Instant;

use crate::handshake::negotiate;
use crate::job::{Asked, Job, JobList, ThreadReport};
use crate::session::read_reply;

/// The bytes of each read that waits for a reply.
const LENGTH: u64 = 512;

/// Has a handshake with a server that sends `data`, and reads replies to five requests. Panics if
/// the client breaks a promise.
#[doc(hidden)]
pub fn fuzz_server(data: &[u8]) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        return;
    };
    runtime.block_on(async {
        let bytes = std::io::Cursor::new(data.to_vec());
        let stream = Box::new(tokio::io::join(bytes, tokio::io::sink()));
        let Ok((mut stream, export)) = negotiate(stream, "disk", None).await else { return };
        assert!(export.length_min <= 4096 && export.length_max >= 4096, "{export:?}");
        assert_eq!(export.length_max % 4096, 0);
        let shared = Arc::new(ThreadReport::default());
        let state = RefCell::new(JobList::new(shared, Duration::from_secs(1)));
        for number in 0..5 {
            let operation =
                [Operation::Read, Operation::Write, Operation::Flush][number as usize % 3];
            let data = Arc::from([]);
            let asked = Asked {
                operation,
                offset: number * LENGTH,
                length: LENGTH,
                flags: Flags::default(),
                data,
            };
            let job = Job { asked, answer: None, deadline: Instant::now() };
            let cookie = state.borrow_mut().admit(job);
            assert!(cookie.is_some_and(|cookie| state.borrow_mut().send(cookie).is_some()));
        }
        let mut replies = 0;
        while read_reply(&mut stream, &state).await.is_ok() {
            replies += 1;
        }
        assert!(replies <= 5, "a request completes once");
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{
        GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, info, option, reply,
    };

    /// What a server sends, without mistakes.
    fn server(replies: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(GREETING_MAGIC.to_be_bytes());
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(3_u16.to_be_bytes());
        let mut answer = |kind: u32, data: &[u8]| {
            bytes.extend(OPTION_REPLY_MAGIC.to_be_bytes());
            bytes.extend(option::GO.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
        };
        let export = [&info::EXPORT.to_be_bytes()[..], &4096_u64.to_be_bytes(), &[0, 13]].concat();
        answer(reply::INFO, &export);
        let sizes = [1_u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
        answer(reply::INFO, &[&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat());
        answer(reply::ACK, &[]);
        for cookie in 1..=replies {
            bytes.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
            bytes.extend(0_u32.to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            if cookie % 3 == 1 {
                bytes.extend([7; LENGTH as usize]);
            }
        }
        bytes
    }

    #[test]
    fn a_server_without_mistakes_is_understood() {
        let data = std::io::Cursor::new(server(0));
        let stream = Box::new(tokio::io::join(data, tokio::io::sink()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (_, export) = runtime.block_on(negotiate(stream, "disk", None)).unwrap();
        assert_eq!((export.capacity, export.flags, export.length_max), (4096, 13, 32 << 20));
    }

    #[test]
    fn no_server_breaks_the_client() {
        let mut chance = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let mut bytes = server(chance.u64(..8));
            for _ in 0..chance.usize(..4) {
                let at = chance.usize(..bytes.len());
                bytes[at] = chance.u8(..);
            }
            bytes.truncate(chance.usize(bytes.len() / 2..=bytes.len()));
            fuzz_server(&bytes);
        }
    }
}
