//! Replies: their headers, and the queue of replies to send.

#![expect(unsafe_code, reason = "messages of many segments")]

use std::collections::VecDeque;
use std::io;

use fathom_block::{Allocation, Extent, Request};

use super::channel::{Channel, is_blocked, message};
use super::wire::{
    BASE_ALLOCATION_ID, DIRTY, EXTENDED_REPLY_MAGIC, Mode, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, chunk, state,
};

/// The most segments in one system call.
const SEGMENTS_MAX: usize = 1024;
/// The longest header, including the fields before the data, in bytes.
const HEADER_LENGTH_MAX: usize = 72;
/// The longest error text, in bytes. Longer texts are truncated.
const TEXT_LENGTH_MAX: usize = 32;
/// The most extents in one reply.
const EXTENTS_MAX: usize = 64 << 10;
/// The longest extent in a reply with 32-bit lengths, in bytes: a multiple of every block size.
const NARROW_LENGTH_MAX: u32 = 0xffff_0000;
/// The most buffers for extents that are kept for reuse.
const SPARE_MAX: usize = 4;

/// The properties of a request that its reply needs.
#[derive(Clone, Copy, Debug)]
pub struct Answered {
    /// The request's cookie.
    pub cookie: u64,
    /// Where its range begins, in bytes.
    pub offset: u64,
    /// Whether the request is a read or a block status, which have structured replies.
    pub structured: bool,
}

/// A queued reply.
#[derive(Debug)]
struct Reply {
    header: [u8; HEADER_LENGTH_MAX],
    header_length: usize,
    body: Body,
    /// The bytes of the connection's budget to give back when the reply has been sent.
    charged: u64,
}

#[derive(Debug)]
enum Body {
    None,
    Data(Box<Request>),
    Bytes(Vec<u8>),
}

impl Reply {
    fn new() -> Self {
        Self { header: [0; HEADER_LENGTH_MAX], header_length: 0, body: Body::None, charged: 0 }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.header[self.header_length..self.header_length + bytes.len()].copy_from_slice(bytes);
        self.header_length += bytes.len();
    }

    /// Writes the header of a reply's only chunk, whose payload has `length` bytes.
    fn chunk(&mut self, mode: Mode, kind: u16, answered: &Answered, length: u64) {
        put_chunk(mode, chunk::DONE, kind, answered, length, |bytes| self.put(bytes));
    }

    fn simple(&mut self, error: u32, cookie: u64) {
        self.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.put(&error.to_be_bytes());
        self.put(&cookie.to_be_bytes());
    }
}

/// Writes the header of a chunk, whose payload has `length` bytes, in pieces.
fn put_chunk(
    mode: Mode,
    flags: u16,
    kind: u16,
    answered: &Answered,
    length: u64,
    mut put: impl FnMut(&[u8]),
) {
    let magic = match mode {
        Mode::Simple | Mode::Structured => STRUCTURED_REPLY_MAGIC,
        Mode::Extended => EXTENDED_REPLY_MAGIC,
    };
    put(&magic.to_be_bytes());
    put(&flags.to_be_bytes());
    put(&kind.to_be_bytes());
    put(&answered.cookie.to_be_bytes());
    match mode {
        Mode::Simple | Mode::Structured => put(&(length as u32).to_be_bytes()),
        Mode::Extended => {
            put(&answered.offset.to_be_bytes());
            put(&length.to_be_bytes());
        }
    }
}

/// The queue of replies, in sending order.
pub struct Replies {
    mode: Mode,
    queue: VecDeque<Reply>,
    /// The number of bytes of the first reply that have been sent.
    sent: usize,
    segments: Vec<libc::iovec>,
    /// A message of the segments, at a place of its own.
    message: Box<libc::msghdr>,
    spare: Vec<Vec<u8>>,
}

impl Replies {
    /// No replies yet.
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            queue: VecDeque::with_capacity(64),
            sent: 0,
            segments: Vec::with_capacity(128),
            message: Box::new(message(&mut [])),
            spare: Vec::new(),
        }
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The number of replies that have not been sent completely.
    pub fn count(&self) -> usize {
        self.queue.len()
    }

    /// Whether the queue has at most `count` replies of together at most `length` bytes.
    pub fn is_within(&self, count: usize, length: usize) -> bool {
        self.queue.len() <= count && self.queue.iter().map(Reply::length).sum::<usize>() <= length
    }

    /// A message of the first replies, of all if they have less than [`SEGMENTS_MAX`] segments. It
    /// is valid until the queue is changed.
    pub fn message(&mut self) -> *const libc::msghdr {
        self.gather();
        *self.message = message(&mut self.segments);
        &raw const *self.message
    }

    /// The length of the next reply to send, in bytes.
    pub fn first_length(&self) -> u64 {
        self.queue.front().map_or(0, |reply| reply.length() as u64)
    }

    /// Queues a reply that a request without data has succeeded.
    pub fn success(&mut self, answered: &Answered, charged: u64) {
        let mut reply = Reply::new();
        reply.charged = charged;
        match self.mode {
            Mode::Extended => reply.chunk(self.mode, chunk::NONE, answered, 0),
            Mode::Structured if answered.structured => {
                reply.chunk(self.mode, chunk::NONE, answered, 0);
            }
            Mode::Simple | Mode::Structured => reply.simple(0, answered.cookie),
        }
        self.queue.push_back(reply);
    }

    /// Queues a reply that a request has failed with the protocol's number `error`; `text` is for
    /// people.
    pub fn failure(&mut self, answered: &Answered, error: u32, text: &str, charged: u64) {
        let mut reply = Reply::new();
        reply.charged = charged;
        let structured = match self.mode {
            Mode::Simple => false,
            Mode::Structured => answered.structured,
            Mode::Extended => true,
        };
        if structured {
            let text = &text.as_bytes()[..text.len().min(TEXT_LENGTH_MAX)];
            reply.chunk(self.mode, chunk::ERROR, answered, 6 + text.len() as u64);
            reply.put(&error.to_be_bytes());
            reply.put(&(text.len() as u16).to_be_bytes());
            reply.put(text);
        } else {
            reply.simple(error, answered.cookie);
        }
        self.queue.push_back(reply);
    }

    /// Queues the reply to a read, with the data in the request's own memory.
    pub fn data(&mut self, answered: &Answered, request: Box<Request>, charged: u64) {
        let mut reply = Reply::new();
        reply.charged = charged;
        match self.mode {
            Mode::Simple => reply.simple(0, answered.cookie),
            Mode::Structured | Mode::Extended => {
                let length = request.buffers.length() + 8;
                reply.chunk(self.mode, chunk::OFFSET_DATA, answered, length);
                reply.put(&answered.offset.to_be_bytes());
            }
        }
        reply.body = Body::Data(request);
        self.queue.push_back(reply);
    }

    /// Queues the reply to a block status: the extents of each context, by its number, with a chunk
    /// for each. With `one`, a chunk has only the first extent.
    pub fn extents(
        &mut self,
        answered: &Answered,
        contexts: &[(u32, Vec<Extent>)],
        one: bool,
        charged: u64,
    ) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        for (index, (id, extents)) in contexts.iter().enumerate() {
            let flags = if index + 1 == contexts.len() { chunk::DONE } else { 0 };
            let count_max = if one { 1 } else { EXTENTS_MAX };
            self.put_extents(&mut bytes, answered, flags, (*id, extents), count_max);
        }
        let mut reply = Reply::new();
        reply.charged = charged;
        reply.body = Body::Bytes(bytes);
        self.queue.push_back(reply);
    }

    /// Appends the chunk of a context.
    fn put_extents(
        &self,
        bytes: &mut Vec<u8>,
        answered: &Answered,
        flags: u16,
        (id, extents): (u32, &[Extent]),
        count_max: usize,
    ) {
        let extended = self.mode == Mode::Extended;
        let kind = if extended { chunk::BLOCK_STATUS_EXTENDED } else { chunk::BLOCK_STATUS };
        put_chunk(self.mode, flags, kind, answered, 0, |piece| bytes.extend(piece));
        let payload = bytes.len();
        bytes.extend(id.to_be_bytes());
        let mut count = 0_u32;
        let count_at = bytes.len();
        if extended {
            bytes.extend([0; 4]);
        }
        let state = if id == BASE_ALLOCATION_ID { allocation } else { dirtiness };
        for (length, flags) in merged(extents, state).take(count_max) {
            count += 1;
            if extended {
                bytes.extend(length.to_be_bytes());
                bytes.extend(u64::from(flags).to_be_bytes());
                continue;
            }
            // The client has to request the rest of an extent that is too long for 32 bits.
            let (narrow, cut) = match u32::try_from(length) {
                Ok(length) => (length, false),
                Err(_) => (NARROW_LENGTH_MAX, true),
            };
            bytes.extend(narrow.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
            if cut {
                break;
            }
        }
        let length = (bytes.len() - payload) as u64;
        if extended {
            bytes[count_at..count_at + 4].copy_from_slice(&count.to_be_bytes());
            bytes[payload - 8..payload].copy_from_slice(&length.to_be_bytes());
        } else {
            bytes[payload - 4..payload].copy_from_slice(&(length as u32).to_be_bytes());
        }
    }

    /// Sends as many replies as there is room for, in as few system calls as possible. Calls `done`
    /// with the request and the budget of each sent reply. Returns false when the channel is full.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send(
        &mut self,
        channel: &mut Channel,
        mut done: impl FnMut(Option<Box<Request>>, u64),
    ) -> io::Result<bool> {
        while !self.queue.is_empty() {
            self.gather();
            // SAFETY: the segments point to headers and bodies of queued replies.
            let sent = match unsafe { channel.send(&mut self.segments) } {
                Ok(count) => count,
                Err(error) if is_blocked(&error) => return Ok(false),
                Err(error) => return Err(error),
            };
            self.advance(sent, &mut done);
        }
        if channel.has_staged() {
            return match channel.flush() {
                Ok(()) => Ok(true),
                Err(error) if is_blocked(&error) => Ok(false),
                Err(error) => Err(error),
            };
        }
        Ok(true)
    }

    /// Removes the replies whose bytes are among the next `sent` bytes. Calls `done` as
    /// [`send`](Self::send) does.
    pub fn advance(&mut self, mut sent: usize, mut done: impl FnMut(Option<Box<Request>>, u64)) {
        while let Some(reply) = self.queue.front() {
            let left = reply.length() - self.sent;
            if sent < left {
                self.sent += sent;
                break;
            }
            sent -= left;
            self.sent = 0;
            let Some(reply) = self.queue.pop_front() else { break };
            match reply.body {
                Body::None => done(None, reply.charged),
                Body::Data(request) => done(Some(request), reply.charged),
                Body::Bytes(bytes) => {
                    if self.spare.len() < SPARE_MAX {
                        self.spare.push(bytes);
                    }
                    done(None, reply.charged);
                }
            }
        }
    }

    /// Collects the segments to send next.
    fn gather(&mut self) {
        self.segments.clear();
        let mut skip = self.sent;
        for reply in &self.queue {
            if self.segments.len() + 1 + reply.segments() > SEGMENTS_MAX {
                break;
            }
            let header = &reply.header[..reply.header_length];
            push(&mut self.segments, &mut skip, header.as_ptr(), header.len());
            match &reply.body {
                Body::None => {}
                Body::Bytes(bytes) => {
                    push(&mut self.segments, &mut skip, bytes.as_ptr(), bytes.len());
                }
                Body::Data(request) => {
                    for segment in request.buffers.segments() {
                        let base = segment.iov_base.cast::<u8>().cast_const();
                        push(&mut self.segments, &mut skip, base, segment.iov_len);
                    }
                }
            }
        }
    }
}

impl Reply {
    fn segments(&self) -> usize {
        match &self.body {
            Body::None => 0,
            Body::Bytes(_) => 1,
            Body::Data(request) => request.buffers.count(),
        }
    }

    fn length(&self) -> usize {
        self.header_length
            + match &self.body {
                Body::None => 0,
                Body::Bytes(bytes) => bytes.len(),
                Body::Data(request) => request.buffers.length() as usize,
            }
    }
}

/// Adds a segment without its first `skip` bytes, and subtracts the omitted bytes from `skip`.
fn push(segments: &mut Vec<libc::iovec>, skip: &mut usize, base: *const u8, length: usize) {
    let left_out = length.min(*skip);
    *skip -= left_out;
    if left_out < length {
        let base = base.wrapping_add(left_out).cast_mut().cast();
        segments.push(libc::iovec { iov_base: base, iov_len: length - left_out });
    }
}

/// The lengths and flags of extents; adjacent extents with equal flags are merged.
fn merged(extents: &[Extent], state: fn(Allocation) -> u32) -> impl Iterator<Item = (u64, u32)> {
    let mut rest =
        extents.iter().map(move |extent| (extent.length, state(extent.allocation))).peekable();
    std::iter::from_fn(move || {
        let (mut length, flags) = rest.next()?;
        while let Some((more, _)) = rest.next_if(|(_, other)| *other == flags) {
            length += more;
        }
        Some((length, flags))
    })
}

/// The flags of a bitmap.
fn dirtiness(allocation: Allocation) -> u32 {
    match allocation {
        Allocation::Hole => 0,
        Allocation::Data | Allocation::Zero => DIRTY,
    }
}

/// The flags of `base:allocation`.
fn allocation(allocation: Allocation) -> u32 {
    match allocation {
        Allocation::Data => 0,
        Allocation::Hole => state::HOLE | state::ZERO,
        Allocation::Zero => state::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, length: u64, allocation: Allocation) -> Extent {
        Extent { offset, length, allocation }
    }

    fn bytes(replies: &Replies) -> Vec<u8> {
        let Some(Reply { header, header_length, body: Body::Bytes(bytes), .. }) =
            replies.queue.front()
        else {
            panic!("a reply with bytes")
        };
        [&header[..*header_length], bytes].concat()
    }

    #[test]
    fn adjacent_extents_merge_and_long_ones_are_cut_for_32_bit_lengths() {
        let extents = [
            extent(0, 10, Allocation::Data),
            extent(10, 20, Allocation::Data),
            extent(30, 5 << 32, Allocation::Hole),
            extent(30 + (5 << 32), 7, Allocation::Zero),
        ];
        let answered = Answered { cookie: 9, offset: 0, structured: true };
        let mut narrow = Replies::new(Mode::Structured);
        narrow.extents(&answered, &[(BASE_ALLOCATION_ID, extents.to_vec())], false, 0);
        let sent = bytes(&narrow);
        // Header, context, and two extents: the second is cut, and none follows it.
        assert_eq!(sent.len(), 20 + 4 + 2 * 8);
        assert_eq!(sent[24..28], 30_u32.to_be_bytes());
        assert_eq!(sent[32..36], 0xffff_0000_u32.to_be_bytes());
        assert_eq!(sent[36..40], (state::HOLE | state::ZERO).to_be_bytes());
        let mut wide = Replies::new(Mode::Extended);
        wide.extents(&answered, &[(BASE_ALLOCATION_ID, extents.to_vec())], false, 0);
        let sent = bytes(&wide);
        assert_eq!(sent.len(), 32 + 8 + 3 * 16);
        assert_eq!(sent[36..40], 3_u32.to_be_bytes());
        assert_eq!(sent[56..64], (5_u64 << 32).to_be_bytes());
        let mut first = Replies::new(Mode::Extended);
        first.extents(&answered, &[(BASE_ALLOCATION_ID, extents.to_vec())], true, 0);
        assert_eq!(bytes(&first).len(), 32 + 8 + 16);
    }

    #[test]
    fn the_longest_error_fits_its_header() {
        let answered = Answered { cookie: 1, offset: 2, structured: true };
        let mut replies = Replies::new(Mode::Extended);
        replies.failure(&answered, 22, &"long ".repeat(100), 3);
        let reply = replies.queue.front().unwrap();
        assert_eq!(reply.header_length, 32 + 6 + TEXT_LENGTH_MAX);
        assert_eq!(reply.charged, 3);
    }
}
