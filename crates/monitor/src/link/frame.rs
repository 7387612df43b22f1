//! The frames that both sides send. `docs/monitor-wire.md` shows their layout.

use crate::read::LAST_TIME_NS;
use crate::recording::MalformedBytes;
use crate::recording::bytes::ByteCursor;

/// The first bytes of each side. No text begins with the first of them.
pub const MAGIC: [u8; 8] = *b"\x8eFATLNK\n";
/// The version of the protocol.
pub const VERSION: u16 = 1;
/// What a sender of [`VERSION`] also knows: 0 the stream `IOstream` alone, 1 fragments that read
/// several streams. Programs of level 0 send a zero and ignore the other side's level.
pub const LEVEL: u8 = 1;
/// The level from which on a host knows several streams.
pub const LEVEL_STREAMS: u8 = 1;
/// The length of the preamble in bytes: [`MAGIC`], [`VERSION`], [`LEVEL`], and a zero.
pub const PREAMBLE: usize = 12;
/// The length of a frame's head in bytes: the frame's length and its kind.
pub const HEAD: usize = 5;
/// The longest reason, in bytes.
pub const REASON_MAX: usize = 512;
/// The longest name of a host, in bytes.
pub const NAME_MAX: usize = 253;
/// The longest frame of fragments, in bytes.
pub const FRAGMENTS_MAX: usize = 1 << 20;
/// The longest frame of rows, in bytes.
pub const ROWS_MAX: usize = 4 << 20;
/// The longest frame of any other kind, in bytes.
const SHORT_MAX: usize = 1024;
/// The largest correction of a clock, in nanoseconds: a century.
const CORRECTION_MAX_NS: i64 = 100 * 366 * 86_400 * 1_000_000_000;

/// The first bytes that each side sends.
pub fn preamble() -> [u8; PREAMBLE] {
    let mut bytes = [0; PREAMBLE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    bytes[10] = LEVEL;
    bytes
}

/// Checks the other side's preamble, and returns its level.
pub fn check_preamble(bytes: &[u8; PREAMBLE]) -> Result<u8, String> {
    if bytes[..8] != MAGIC {
        return Err("the other side speaks another protocol".into());
    }
    match u16::from_le_bytes([bytes[8], bytes[9]]) {
        VERSION => Ok(bytes[10]),
        other => Err(format!(
            "the other side speaks version {other}, only version {VERSION} is supported"
        )),
    }
}

/// A frame from a host. Frames with a number are kept until the centre has acknowledged them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromHost<'a> {
    /// The host's name and software version.
    Hello { name: &'a str, version: &'a str },
    /// The fragments of an epoch run. `resumed`: they ran before, and the numbers continue.
    Accepted { epoch: u32, resumed: bool },
    /// The host refuses the fragments of an epoch.
    Refused { epoch: u32, reason: &'a str },
    /// Rows of a fragment. `reset`: the centre first removes the rows of the fragment that it
    /// holds.
    Rows { number: u64, fragment: u16, reset: bool, block: &'a [u8] },
    /// An instant, in nanoseconds, before which no more rows follow; and the number of events
    /// processed.
    Watermark { number: u64, time_ns: i64, events: u64 },
    /// The numbers of events that the fragments did not get, and of rows that were not sent.
    Dropped { number: u64, events: u64, rows: u64 },
    /// The answer to a ping, with the host's clock in nanoseconds.
    Pong { ping: u32, clock_ns: i64 },
    /// The host disconnects.
    Bye { reason: &'a str },
}

/// A frame from the centre.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromCentre<'a> {
    /// The number of this run of the centre.
    Welcome { run: u64 },
    /// The fragments that replace those of the host. `number` is the last one that the centre has
    /// received in this epoch. `fresh`: the centre holds no rows of the host.
    Fragments { epoch: u32, number: u64, fresh: bool, correction_ns: i64, plans: &'a [u8] },
    /// Requests the host's clock.
    Ping { ping: u32 },
    /// The centre has received all frames up to a number.
    Acknowledged { number: u64 },
    /// The new correction of the host's clock, in nanoseconds.
    Correction { correction_ns: i64 },
    /// The centre disconnects.
    Bye { reason: &'a str },
}

mod kind {
    pub const HELLO: u8 = 1;
    pub const ACCEPTED: u8 = 2;
    pub const REFUSED: u8 = 3;
    pub const ROWS: u8 = 4;
    pub const WATERMARK: u8 = 5;
    pub const DROPPED: u8 = 6;
    pub const PONG: u8 = 7;
    pub const HOST_BYE: u8 = 8;
    pub const WELCOME: u8 = 65;
    pub const FRAGMENTS: u8 = 66;
    pub const PING: u8 = 67;
    pub const ACKNOWLEDGED: u8 = 68;
    pub const CORRECTION: u8 = 69;
    pub const CENTRE_BYE: u8 = 70;
}

/// The sender of a stream of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The host.
    Host,
    /// The centre.
    Centre,
}

impl Sender {
    /// The longest frame of a kind, in bytes; `None` if the sender does not send this kind.
    pub fn limit(self, kind: u8) -> Option<usize> {
        match (self, kind) {
            (Self::Host, kind::ROWS) => Some(ROWS_MAX),
            (Self::Host, kind::HELLO..=kind::HOST_BYE)
            | (Self::Centre, kind::WELCOME | kind::PING..=kind::CENTRE_BYE) => Some(SHORT_MAX),
            (Self::Centre, kind::FRAGMENTS) => Some(FRAGMENTS_MAX),
            _ => None,
        }
    }
}

/// Writes a frame.
struct Output<'o> {
    out: &'o mut Vec<u8>,
    begin: usize,
}

impl<'o> Output<'o> {
    fn new(out: &'o mut Vec<u8>, kind: u8) -> Self {
        let begin = out.len();
        out.extend_from_slice(&[0, 0, 0, 0, kind]);
        Self { out, begin }
    }

    fn put(self, bytes: &[u8]) -> Self {
        self.out.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str, most: usize) -> Self {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.put(&(end as u16).to_le_bytes()).put(&text.as_bytes()[..end])
    }
}

impl Drop for Output<'_> {
    fn drop(&mut self) {
        let length = (self.out.len() - self.begin - HEAD) as u32;
        self.out[self.begin..self.begin + 4].copy_from_slice(&length.to_le_bytes());
    }
}

fn text<'a>(input: &mut ByteCursor<'a>, most: usize) -> Result<&'a str, MalformedBytes> {
    let length = input.fixed::<2>()? as usize;
    if length > most {
        return Err(MalformedBytes("a text is too long"));
    }
    std::str::from_utf8(input.take(length)?).map_err(|_| MalformedBytes("a text is not UTF-8"))
}

fn flag(input: &mut ByteCursor<'_>) -> Result<bool, MalformedBytes> {
    match input.byte()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(MalformedBytes("a flag is neither 0 nor 1")),
    }
}

fn time(input: &mut ByteCursor<'_>) -> Result<i64, MalformedBytes> {
    let time = input.fixed::<8>()? as i64;
    if (0..=LAST_TIME_NS).contains(&time) {
        Ok(time)
    } else {
        Err(MalformedBytes("a time is out of range"))
    }
}

fn correction(input: &mut ByteCursor<'_>) -> Result<i64, MalformedBytes> {
    let correction = input.fixed::<8>()? as i64;
    if (-CORRECTION_MAX_NS..=CORRECTION_MAX_NS).contains(&correction) {
        Ok(correction)
    } else {
        Err(MalformedBytes("a correction is out of range"))
    }
}

fn rest<'a>(input: &mut ByteCursor<'a>) -> Result<&'a [u8], MalformedBytes> {
    input.take(input.left())
}

fn ended<T>(input: &ByteCursor<'_>, frame: T) -> Result<T, MalformedBytes> {
    if input.left() == 0 { Ok(frame) } else { Err(MalformedBytes("a frame is too long")) }
}

impl<'a> FromHost<'a> {
    /// Appends the frame's bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        let _ = match *self {
            Self::Hello { name, version } => {
                Output::new(out, kind::HELLO).text(name, NAME_MAX).text(version, 64)
            }
            Self::Accepted { epoch, resumed } => {
                Output::new(out, kind::ACCEPTED).put(&epoch.to_le_bytes()).put(&[u8::from(resumed)])
            }
            Self::Refused { epoch, reason } => {
                Output::new(out, kind::REFUSED).put(&epoch.to_le_bytes()).text(reason, REASON_MAX)
            }
            Self::Rows { number, fragment, reset, block } => Output::new(out, kind::ROWS)
                .put(&number.to_le_bytes())
                .put(&fragment.to_le_bytes())
                .put(&[u8::from(reset)])
                .put(block),
            Self::Watermark { number, time_ns, events } => Output::new(out, kind::WATERMARK)
                .put(&number.to_le_bytes())
                .put(&time_ns.to_le_bytes())
                .put(&events.to_le_bytes()),
            Self::Dropped { number, events, rows } => Output::new(out, kind::DROPPED)
                .put(&number.to_le_bytes())
                .put(&events.to_le_bytes())
                .put(&rows.to_le_bytes()),
            Self::Pong { ping, clock_ns } => {
                Output::new(out, kind::PONG).put(&ping.to_le_bytes()).put(&clock_ns.to_le_bytes())
            }
            Self::Bye { reason } => Output::new(out, kind::HOST_BYE).text(reason, REASON_MAX),
        };
    }

    /// Decodes a frame of a kind from its bytes.
    ///
    /// # Errors
    /// If the bytes are not such a frame.
    pub fn read(kind: u8, bytes: &'a [u8]) -> Result<Self, MalformedBytes> {
        let mut input = ByteCursor::new(bytes, 0);
        let input = &mut input;
        let frame = match kind {
            kind::HELLO => Self::Hello { name: text(input, NAME_MAX)?, version: text(input, 64)? },
            kind::ACCEPTED => {
                Self::Accepted { epoch: input.fixed::<4>()? as u32, resumed: flag(input)? }
            }
            kind::REFUSED => Self::Refused {
                epoch: input.fixed::<4>()? as u32,
                reason: text(input, REASON_MAX)?,
            },
            kind::ROWS => Self::Rows {
                number: input.fixed::<8>()?,
                fragment: input.fixed::<2>()? as u16,
                reset: flag(input)?,
                block: rest(input)?,
            },
            kind::WATERMARK => Self::Watermark {
                number: input.fixed::<8>()?,
                time_ns: time(input)?,
                events: input.fixed::<8>()?,
            },
            kind::DROPPED => Self::Dropped {
                number: input.fixed::<8>()?,
                events: input.fixed::<8>()?,
                rows: input.fixed::<8>()?,
            },
            kind::PONG => Self::Pong { ping: input.fixed::<4>()? as u32, clock_ns: time(input)? },
            kind::HOST_BYE => Self::Bye { reason: text(input, REASON_MAX)? },
            _ => return Err(MalformedBytes("a frame of an unknown kind")),
        };
        ended(input, frame)
    }
}

impl<'a> FromCentre<'a> {
    /// Appends the frame's bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        let _ = match *self {
            Self::Welcome { run } => Output::new(out, kind::WELCOME).put(&run.to_le_bytes()),
            Self::Fragments { epoch, number, fresh, correction_ns, plans } => {
                Output::new(out, kind::FRAGMENTS)
                    .put(&epoch.to_le_bytes())
                    .put(&number.to_le_bytes())
                    .put(&[u8::from(fresh)])
                    .put(&correction_ns.to_le_bytes())
                    .put(plans)
            }
            Self::Ping { ping } => Output::new(out, kind::PING).put(&ping.to_le_bytes()),
            Self::Acknowledged { number } => {
                Output::new(out, kind::ACKNOWLEDGED).put(&number.to_le_bytes())
            }
            Self::Correction { correction_ns } => {
                Output::new(out, kind::CORRECTION).put(&correction_ns.to_le_bytes())
            }
            Self::Bye { reason } => Output::new(out, kind::CENTRE_BYE).text(reason, REASON_MAX),
        };
    }

    /// Decodes a frame of a kind from its bytes.
    ///
    /// # Errors
    /// If the bytes are not such a frame.
    pub fn read(kind: u8, bytes: &'a [u8]) -> Result<Self, MalformedBytes> {
        let mut input = ByteCursor::new(bytes, 0);
        let input = &mut input;
        let frame = match kind {
            kind::WELCOME => Self::Welcome { run: input.fixed::<8>()? },
            kind::FRAGMENTS => Self::Fragments {
                epoch: input.fixed::<4>()? as u32,
                number: input.fixed::<8>()?,
                fresh: flag(input)?,
                correction_ns: correction(input)?,
                plans: rest(input)?,
            },
            kind::PING => Self::Ping { ping: input.fixed::<4>()? as u32 },
            kind::ACKNOWLEDGED => Self::Acknowledged { number: input.fixed::<8>()? },
            kind::CORRECTION => Self::Correction { correction_ns: correction(input)? },
            kind::CENTRE_BYE => Self::Bye { reason: text(input, REASON_MAX)? },
            _ => return Err(MalformedBytes("a frame of an unknown kind")),
        };
        ended(input, frame)
    }
}

/// The received bytes of a stream of frames.
#[derive(Debug)]
pub struct Inbox {
    sender: Sender,
    bytes: Vec<u8>,
    /// The position of the next frame.
    start: usize,
}

impl Inbox {
    /// An empty stream of frames of this sender.
    pub fn new(sender: Sender) -> Self {
        Self { sender, bytes: Vec::new(), start: 0 }
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The kind and the bytes of the next frame; `None` until the frame is complete.
    ///
    /// # Errors
    /// If the next bytes are not a frame. Nothing after them can be decoded.
    pub fn next(&mut self) -> Result<Option<(u8, &[u8])>, MalformedBytes> {
        let Some(head) = self.bytes.get(self.start..self.start + HEAD) else { return Ok(None) };
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let kind = head[4];
        let limit = self.sender.limit(kind).ok_or(MalformedBytes("a frame of an unknown kind"))?;
        if length > limit {
            return Err(MalformedBytes("a frame is too long"));
        }
        let begin = self.start + HEAD;
        let Some(frame) = self.bytes.get(begin..begin + length) else { return Ok(None) };
        self.start = begin + length;
        Ok(Some((kind, frame)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_host() -> Vec<FromHost<'static>> {
        vec![
            FromHost::Hello { name: "host-1", version: "0.1" },
            FromHost::Accepted { epoch: 7, resumed: true },
            FromHost::Refused { epoch: 7, reason: "no" },
            FromHost::Rows { number: 3, fragment: 2, reset: true, block: b"block" },
            FromHost::Watermark { number: 4, time_ns: 9, events: 11 },
            FromHost::Dropped { number: 5, events: 1, rows: 2 },
            FromHost::Pong { ping: 1, clock_ns: LAST_TIME_NS },
            FromHost::Bye { reason: "ends" },
        ]
    }

    fn of_centre() -> Vec<FromCentre<'static>> {
        vec![
            FromCentre::Welcome { run: u64::MAX },
            FromCentre::Fragments {
                epoch: 1,
                number: 2,
                fresh: false,
                correction_ns: -3,
                plans: b"plans",
            },
            FromCentre::Ping { ping: 1 },
            FromCentre::Acknowledged { number: 8 },
            FromCentre::Correction { correction_ns: CORRECTION_MAX_NS },
            FromCentre::Bye { reason: "full" },
        ]
    }

    /// Each frame is read as it was written, in pieces of any size. A frame that is too short or
    /// too long is rejected.
    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        for frame in of_host() {
            frame.write(&mut bytes);
        }
        let mut inbox = Inbox::new(Sender::Host);
        let mut read = 0;
        for byte in &bytes {
            inbox.add(&[*byte]);
            if let Some((kind, frame)) = inbox.next().unwrap() {
                assert_eq!(FromHost::read(kind, frame), Ok(of_host()[read].clone()));
                if kind != kind::ROWS {
                    let longer = [frame, &[0]].concat();
                    assert!(FromHost::read(kind, &longer).is_err());
                    assert!(FromHost::read(kind, &frame[..frame.len() - 1]).is_err());
                }
                read += 1;
            }
        }
        assert_eq!(read, of_host().len());
        let mut bytes = Vec::new();
        for frame in of_centre() {
            frame.write(&mut bytes);
        }
        let mut inbox = Inbox::new(Sender::Centre);
        inbox.add(&bytes);
        for frame in of_centre() {
            let (kind, bytes) = inbox.next().unwrap().unwrap();
            assert_eq!(FromCentre::read(kind, bytes), Ok(frame));
        }
        assert_eq!(inbox.next(), Ok(None));
    }

    #[test]
    fn long_and_unknown_frames_are_rejected_at_their_heads() {
        for (sender, kind, length) in [
            (Sender::Host, kind::ROWS, ROWS_MAX + 1),
            (Sender::Host, kind::HELLO, SHORT_MAX + 1),
            (Sender::Host, kind::WELCOME, 0),
            (Sender::Host, 0, 0),
            (Sender::Centre, kind::FRAGMENTS, FRAGMENTS_MAX + 1),
            (Sender::Centre, kind::ROWS, 0),
            (Sender::Centre, 255, usize::MAX),
        ] {
            let mut inbox = Inbox::new(sender);
            inbox.add(&(length as u32).to_le_bytes());
            inbox.add(&[kind]);
            assert!(inbox.next().is_err(), "{kind} {length}");
        }
    }

    #[test]
    fn long_texts_are_cut_where_a_character_ends() {
        let reason = "é".repeat(REASON_MAX);
        let mut bytes = Vec::new();
        FromHost::Bye { reason: &reason }.write(&mut bytes);
        let cut = "é".repeat(REASON_MAX / 2);
        assert_eq!(FromHost::read(bytes[4], &bytes[HEAD..]), Ok(FromHost::Bye { reason: &cut }));
    }
}
