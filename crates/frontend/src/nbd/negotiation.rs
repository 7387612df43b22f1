//! The handshake, as a state machine over bytes. It performs no I/O, so that it can be tested and
//! fuzzed.
//!
//! ```text
//!  greeting ─▶ client flags ─▶ option ─▶ option ─▶ … ─▶ GO or EXPORT_NAME ─▶ transmission
//!                                │
//!                                └─ STARTTLS: everything agreed so far is void
//! ```
//! The owner sends [`Negotiation::GREETING`], passes received bytes to [`Negotiation::feed`] and
//! sends its output. Each call processes at most one option. So the output of a call is bounded by
//! the list of exports. The number of options is bounded too.

mod metadata;

use super::bitmaps::BitmapRefusal;
use super::wire::{
    GREETING_MAGIC, Mode, OPTION_MAGIC, OPTION_REPLY_MAGIC, STRING_LENGTH_MAX, handshake, info,
    option, read_u16, read_u32, read_u64, reply, transmission,
};

pub use metadata::Contexts;

/// The length of an option's header, in bytes.
const OPTION_HEADER_LENGTH: usize = 16;
/// The longest option data that is parsed, in bytes. Longer data is skipped and refused.
pub const OPTION_LENGTH_MAX: usize = 64 << 10;
/// The longest option data that is skipped, in bytes. Longer data ends the connection.
const OPTION_SKIPPED_MAX: u64 = 16 << 20;
/// The most options that a client may send before its connection is closed.
const OPTIONS_MAX: u32 = 256;

/// The description of an export for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The canonical name.
    pub name: String,
    /// A description for people; may be empty.
    pub text: String,
    /// The size, in bytes.
    pub capacity: u64,
    /// See [`transmission`].
    pub flags: u16,
    /// The unit of offsets and lengths, in bytes.
    pub block_minimum: u32,
    /// The best size of a request, in bytes.
    pub block_preferred: u32,
    /// The longest read or write, in bytes.
    pub block_maximum: u32,
}

/// A source of exports.
pub trait Catalogue {
    /// A handle that is held while an export is used.
    type Export;

    /// The export of this name; the empty name means the default one.
    fn find(&self, name: &str) -> Option<(Self::Export, Description)>;

    /// Calls `visit` with the name and the text of each export.
    fn each(&self, visit: &mut dyn FnMut(&str, &str));

    /// The names of at most `count` bitmaps of an export.
    fn bitmaps(&self, export: &Self::Export, count: usize) -> Vec<String>;

    /// Whether an export has a bitmap of this name.
    ///
    /// # Errors
    /// Why it has none.
    fn find_bitmap(&self, export: &Self::Export, name: &str) -> Result<(), BitmapRefusal>;
}

/// The result of a successful negotiation.
#[derive(Debug)]
pub struct Agreement<E> {
    /// The export.
    pub export: E,
    /// The form of requests and replies.
    pub mode: Mode,
    /// What block status replies describe.
    pub contexts: Contexts,
}

/// The caller's next action after a call of [`Negotiation::feed`].
#[derive(Debug)]
pub enum Step<E> {
    /// Read more.
    Incomplete,
    /// Call again with the rest of the bytes.
    Again,
    /// Send the output, begin TLS, then call [`Negotiation::secured`].
    StartTls,
    /// Send the output; the rest of the bytes are requests.
    Transmit(Agreement<E>),
    /// Send the output and close: the client has ended the negotiation.
    Leave,
    /// Close: the client violated the protocol, or policy excludes it.
    Refuse(&'static str),
}

/// Whether TLS is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS is not available.
    Plain,
    /// A client may use TLS.
    Optional,
    /// A client must use TLS.
    Required,
}

/// The server's side of one handshake.
#[derive(Debug)]
pub struct Negotiation {
    security: Security,
    secured: bool,
    client_flags: Option<u32>,
    mode: Mode,
    /// The contexts that were chosen, and the export for which they were.
    chosen: Option<(String, Contexts)>,
    options: u32,
    skip: u64,
}

impl Negotiation {
    /// The server's first message.
    pub const GREETING: [u8; 18] = {
        let mut greeting = [0; 18];
        let (magic, option) = (GREETING_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes());
        let mut index = 0;
        while index < 8 {
            greeting[index] = magic[index];
            greeting[8 + index] = option[index];
            index += 1;
        }
        greeting[17] = (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) as u8;
        greeting
    };

    /// A handshake that has not begun.
    pub fn new(security: Security) -> Self {
        Self {
            security,
            secured: false,
            client_flags: None,
            mode: Mode::Simple,
            chosen: None,
            options: 0,
            skip: 0,
        }
    }

    /// Records that TLS has started. Everything agreed before is void, because an attacker may have
    /// sent it.
    pub fn secured(&mut self) {
        self.secured = true;
        self.mode = Mode::Simple;
        self.chosen = None;
    }

    /// Takes one step over `input` and appends the reply to `output`. Returns the number of bytes
    /// of `input` that were used, and the caller's next action.
    pub fn feed<C: Catalogue>(
        &mut self,
        input: &[u8],
        output: &mut Vec<u8>,
        catalogue: &C,
    ) -> (usize, Step<C::Export>) {
        if self.skip > 0 {
            let count = self.skip.min(input.len() as u64);
            self.skip -= count;
            let step = if self.skip > 0 { Step::Incomplete } else { Step::Again };
            return (count as usize, step);
        }
        let Some(client_flags) = self.client_flags else {
            return self.client_flags(input);
        };
        let Some(header) = input.first_chunk::<OPTION_HEADER_LENGTH>() else {
            return (0, Step::Incomplete);
        };
        if read_u64(header, 0) != Some(OPTION_MAGIC) {
            return (0, Step::Refuse("an option without its magic"));
        }
        let (Some(code), Some(length)) = (read_u32(header, 8), read_u32(header, 12)) else {
            return (0, Step::Incomplete);
        };
        if client_flags & u32::from(handshake::FIXED_NEWSTYLE) == 0 && code != option::EXPORT_NAME {
            return (0, Step::Refuse("an option that needs the fixed newstyle handshake"));
        }
        let length = length as usize;
        if length > OPTION_LENGTH_MAX {
            return self.too_long(code, length as u64, output);
        }
        let Some(data) = input.get(OPTION_HEADER_LENGTH..OPTION_HEADER_LENGTH + length) else {
            return (0, Step::Incomplete);
        };
        let used = OPTION_HEADER_LENGTH + length;
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return (used, Step::Refuse("too many options"));
        }
        (used, self.option(code, data, output, catalogue))
    }

    fn client_flags<E>(&mut self, input: &[u8]) -> (usize, Step<E>) {
        let Some(flags) = read_u32(input, 0) else {
            return (0, Step::Incomplete);
        };
        if flags & !u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) != 0 {
            return (4, Step::Refuse("unknown handshake flags"));
        }
        self.client_flags = Some(flags);
        (4, Step::Again)
    }

    fn too_long<E>(&mut self, code: u32, length: u64, output: &mut Vec<u8>) -> (usize, Step<E>) {
        self.options += 1;
        if length > OPTION_SKIPPED_MAX || code == option::EXPORT_NAME || self.options > OPTIONS_MAX
        {
            return (0, Step::Refuse("an option that is too long"));
        }
        self.skip = length;
        refuse(output, code, reply::ERROR_TOO_BIG, "the option is too long");
        (OPTION_HEADER_LENGTH, Step::Again)
    }

    fn option<C: Catalogue>(
        &mut self,
        code: u32,
        data: &[u8],
        output: &mut Vec<u8>,
        catalogue: &C,
    ) -> Step<C::Export> {
        let insecure = self.security == Security::Required && !self.secured;
        if insecure && !matches!(code, option::STARTTLS | option::ABORT) {
            if code == option::EXPORT_NAME {
                return Step::Refuse("a plain connection where TLS is required");
            }
            refuse(output, code, reply::ERROR_TLS_REQUIRED, "TLS is required");
            return Step::Again;
        }
        match code {
            option::EXPORT_NAME => return self.export_name(data, output, catalogue),
            option::ABORT => {
                acknowledge(output, code);
                return Step::Leave;
            }
            option::LIST => list(data, output, catalogue),
            option::STARTTLS => return self.start_tls(data, output),
            option::INFO | option::GO => return self.go(code, data, output, catalogue),
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => self.widen(code, data, output),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(code, data, output, catalogue);
            }
            _ => refuse(output, code, reply::ERROR_UNSUPPORTED, "the option is unknown"),
        }
        Step::Again
    }

    fn export_name<C: Catalogue>(
        &self,
        data: &[u8],
        output: &mut Vec<u8>,
        catalogue: &C,
    ) -> Step<C::Export> {
        let Some(name) = string(data) else {
            return Step::Refuse("an invalid export name");
        };
        let Some((export, description)) = catalogue.find(name) else {
            return Step::Refuse("no export of this name");
        };
        output.extend(description.capacity.to_be_bytes());
        output.extend(self.flags(&description).to_be_bytes());
        let no_zeroes = u32::from(handshake::NO_ZEROES);
        if self.client_flags.is_some_and(|flags| flags & no_zeroes == 0) {
            output.extend([0; 124]);
        }
        Step::Transmit(self.agreement(export, name, &description))
    }

    fn start_tls<E>(&self, data: &[u8], output: &mut Vec<u8>) -> Step<E> {
        let code = option::STARTTLS;
        if !data.is_empty() || self.secured {
            refuse(output, code, reply::ERROR_INVALID, "TLS cannot start here");
            return Step::Again;
        }
        if self.security == Security::Plain {
            refuse(output, code, reply::ERROR_POLICY, "TLS is not available");
            return Step::Again;
        }
        acknowledge(output, code);
        Step::StartTls
    }

    fn go<C: Catalogue>(
        &self,
        code: u32,
        data: &[u8],
        output: &mut Vec<u8>,
        catalogue: &C,
    ) -> Step<C::Export> {
        let Some((name, requested)) = name_and_infos(data) else {
            refuse(output, code, reply::ERROR_INVALID, "the option's lengths are inconsistent");
            return Step::Again;
        };
        let Some((export, description)) = catalogue.find(name) else {
            refuse(output, code, reply::ERROR_UNKNOWN, "no export of this name");
            return Step::Again;
        };
        let begin = answer(output, code, reply::INFO);
        output.extend(info::EXPORT.to_be_bytes());
        output.extend(description.capacity.to_be_bytes());
        output.extend(self.flags(&description).to_be_bytes());
        finish(output, begin);
        // Sent even if the client has not requested it, because a client may ignore it.
        let begin = answer(output, code, reply::INFO);
        output.extend(info::BLOCK_SIZE.to_be_bytes());
        output.extend(description.block_minimum.to_be_bytes());
        output.extend(description.block_preferred.to_be_bytes());
        output.extend(description.block_maximum.to_be_bytes());
        finish(output, begin);
        let requests = |kind: u16| requested.chunks_exact(2).any(|pair| pair == kind.to_be_bytes());
        for (kind, text) in
            [(info::NAME, &description.name), (info::DESCRIPTION, &description.text)]
        {
            if requests(kind) && !text.is_empty() {
                let begin = answer(output, code, reply::INFO);
                output.extend(kind.to_be_bytes());
                output.extend(text.as_bytes());
                finish(output, begin);
            }
        }
        acknowledge(output, code);
        if code == option::INFO {
            return Step::Again;
        }
        Step::Transmit(self.agreement(export, name, &description))
    }

    /// Agrees on structured replies or extended headers.
    fn widen(&mut self, code: u32, data: &[u8], output: &mut Vec<u8>) {
        let (mode, before) = if code == option::EXTENDED_HEADERS {
            (Mode::Extended, self.mode != Mode::Extended)
        } else {
            (Mode::Structured, self.mode == Mode::Simple)
        };
        if !data.is_empty() || !before {
            refuse(output, code, reply::ERROR_INVALID, "already agreed, or unexpected data");
            return;
        }
        self.mode = mode;
        acknowledge(output, code);
    }

    fn agreement<E>(&self, export: E, name: &str, description: &Description) -> Agreement<E> {
        debug_assert!(name.is_empty() || name == description.name);
        // A choice holds only for its export.
        let chosen = self.chosen.as_ref().filter(|(chosen, _)| *chosen == description.name);
        let contexts = chosen.map(|(_, contexts)| contexts.clone()).unwrap_or_default();
        Agreement { export, mode: self.mode, contexts }
    }

    fn flags(&self, description: &Description) -> u16 {
        match self.mode {
            Mode::Simple => description.flags & !transmission::SEND_DF,
            Mode::Structured | Mode::Extended => description.flags,
        }
    }
}

/// A string of the protocol: bounded, UTF-8, without NUL.
fn string(bytes: &[u8]) -> Option<&str> {
    if bytes.len() > STRING_LENGTH_MAX || bytes.contains(&0) {
        return None;
    }
    std::str::from_utf8(bytes).ok()
}

/// Parses a string after its 32-bit length. Returns the string and the rest of the data.
fn counted_string(data: &[u8]) -> Option<(&str, &[u8])> {
    let length = read_u32(data, 0)? as usize;
    let rest = data.get(4..)?;
    Some((string(rest.get(..length)?)?, rest.get(length..)?))
}

/// The data of INFO and GO: a name, a count, and that many 16-bit kinds.
fn name_and_infos(data: &[u8]) -> Option<(&str, &[u8])> {
    let (name, rest) = counted_string(data)?;
    let count = usize::from(read_u16(rest, 0)?);
    let infos = rest.get(2..)?;
    (infos.len() == count * 2).then_some((name, infos))
}

fn list<C: Catalogue>(data: &[u8], output: &mut Vec<u8>, catalogue: &C) {
    if !data.is_empty() {
        refuse(output, option::LIST, reply::ERROR_INVALID, "unexpected data");
        return;
    }
    catalogue.each(&mut |name, text| {
        let begin = answer(output, option::LIST, reply::SERVER);
        output.extend((name.len() as u32).to_be_bytes());
        output.extend(name.as_bytes());
        output.extend(text.as_bytes());
        finish(output, begin);
    });
    acknowledge(output, option::LIST);
}

/// Begins a reply; [`finish`] sets its length.
fn answer(output: &mut Vec<u8>, code: u32, kind: u32) -> usize {
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(code.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend([0; 4]);
    output.len()
}

fn finish(output: &mut [u8], begin: usize) {
    let length = (output.len() - begin) as u32;
    output[begin - 4..begin].copy_from_slice(&length.to_be_bytes());
}

fn acknowledge(output: &mut Vec<u8>, code: u32) {
    let begin = answer(output, code, reply::ACK);
    finish(output, begin);
}

fn refuse(output: &mut Vec<u8>, code: u32, kind: u32, text: &str) {
    let begin = answer(output, code, kind);
    output.extend(text.as_bytes());
    finish(output, begin);
}
