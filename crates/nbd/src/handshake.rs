//! The handshake with a server: fixed newstyle, `OPT_STARTTLS` and `OPT_GO`.

use fathom_failure::Failure;
use fathom_failure::text::foreign;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::stream::{AnyStream, Secure};
use crate::wire::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, handshake, info, option, read_u16, read_u32,
    read_u64, reply, transmission,
};

/// The most bytes of a reply to an option.
const REPLY_LENGTH_MAX: u32 = 64 << 10;
/// The most replies to an option.
const REPLIES_MAX: u32 = 64;
/// The most bytes of a text of the server that a message shows.
const TEXT_LENGTH_MAX: usize = 200;
/// The largest request that every server takes, in bytes.
const LENGTH_MAX: u32 = 32 << 20;

/// What an export offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// Its size, in bytes.
    pub(crate) capacity: u64,
    /// See [`transmission`].
    pub(crate) flags: u16,
    /// The smallest and the largest request, in bytes.
    pub(crate) length_min: u32,
    /// See `length_min`.
    pub(crate) length_max: u32,
    /// The preferred size of a request, in bytes.
    pub(crate) length_best: u32,
}

impl Export {
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Agrees with a server on an export.
///
/// # Errors
/// If the server does not offer the export, or in another way than this client requires.
pub(crate) async fn negotiate(
    mut stream: AnyStream,
    name: &str,
    secure: Option<&Secure>,
) -> Result<(AnyStream, Export), Failure> {
    let mut greeting = [0; 18];
    read(&mut stream, &mut greeting).await?;
    let flags = read_u16(&greeting, 16).unwrap_or(0);
    if read_u64(&greeting, 0) != Some(GREETING_MAGIC)
        || read_u64(&greeting, 8) != Some(OPTION_MAGIC)
    {
        return Err(Failure::new("this is no NBD server of today"));
    }
    if flags & handshake::FIXED_NEWSTYLE == 0 {
        let message = "the server does not speak the newstyle protocol";
        return Err(Failure::new(message).advise("use a newer one"));
    }
    let flags = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    write(&mut stream, &u32::from(flags).to_be_bytes()).await?;
    if let Some(secure) = secure {
        ask(&mut stream, option::STARTTLS, &[]).await?;
        match answer(&mut stream, option::STARTTLS).await? {
            (reply::ACK, _) => {}
            (kind, data) => return Err(refused(kind, &data, "it offers no TLS")),
        }
        stream = secure.start(stream).await?;
    }
    let mut data = Vec::with_capacity(name.len() + 8);
    data.extend((name.len() as u32).to_be_bytes());
    data.extend(name.as_bytes());
    data.extend(1_u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    ask(&mut stream, option::GO, &data).await?;
    let (mut found, mut sizes) = (None, None);
    for _ in 0..REPLIES_MAX {
        let (kind, data) = answer(&mut stream, option::GO).await?;
        match kind {
            reply::INFO => match read_u16(&data, 0) {
                Some(info::EXPORT) if data.len() == 12 => {
                    found = read_u64(&data, 2).zip(read_u16(&data, 10));
                }
                Some(info::BLOCK_SIZE) if data.len() == 14 => {
                    let size = |at: usize| read_u32(&data, at).unwrap_or(0);
                    sizes = Some((size(2), size(6), size(10)));
                }
                Some(info::EXPORT | info::BLOCK_SIZE) | None => {
                    return Err(Failure::new("the server's reply is invalid"));
                }
                Some(_) => {}
            },
            reply::ACK => return Ok((stream, export(found, sizes)?)),
            kind => return Err(refused(kind, &data, "it does not offer the export")),
        }
    }
    Err(Failure::new("the server has too many replies"))
}

/// Checks what a server offers.
fn export(found: Option<(u64, u16)>, sizes: Option<(u32, u32, u32)>) -> Result<Export, Failure> {
    let (capacity, flags) =
        found.ok_or_else(|| Failure::new("the server does not describe the export"))?;
    let (length_min, length_best, length_max) = sizes.unwrap_or((1, 4096, LENGTH_MAX));
    if !length_min.is_power_of_two() || length_min > 4096 || length_max < length_min.max(4096) {
        let message = format!("the export takes requests of {length_min} to {length_max} bytes");
        return Err(Failure::new(message).advise("it has to take those of 4096"));
    }
    if i64::try_from(capacity).is_err() || flags & transmission::HAS_FLAGS == 0 {
        return Err(Failure::new("the server's description of the export is invalid"));
    }
    let length_max = length_max.min(LENGTH_MAX) / 4096 * 4096;
    Ok(Export { capacity, flags, length_min, length_max, length_best })
}

/// The error of a refused option.
fn refused(kind: u32, data: &[u8], otherwise: &str) -> Failure {
    let text = String::from_utf8_lossy(&data[..data.len().min(TEXT_LENGTH_MAX)]);
    let text = foreign(&text);
    let (reason, remedy) = match kind {
        reply::ERROR_TLS_REQUIRED => ("it requires TLS", "use `nbds://`"),
        reply::ERROR_UNKNOWN => ("it has no such export", "correct the name"),
        reply::ERROR_POLICY => ("it does not allow it", ""),
        _ => (otherwise, ""),
    };
    let text = if text.is_empty() { text } else { format!(" ({text})") };
    Failure::new(format!("the server refuses{text}: {reason}")).advise(remedy)
}

async fn ask(stream: &mut AnyStream, code: u32, data: &[u8]) -> Result<(), Failure> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend(code.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    write(stream, &bytes).await
}

/// The kind and the data of the next reply to the option `code`.
async fn answer(stream: &mut AnyStream, code: u32) -> Result<(u32, Vec<u8>), Failure> {
    let mut header = [0; 20];
    read(stream, &mut header).await?;
    let number = |at: usize| read_u32(&header, at).unwrap_or(0);
    let (option, kind, length) = (number(8), number(12), number(16));
    if read_u64(&header, 0) != Some(OPTION_REPLY_MAGIC)
        || option != code
        || length > REPLY_LENGTH_MAX
    {
        return Err(Failure::new("the server's reply is invalid"));
    }
    let mut data = vec![0; length as usize];
    read(stream, &mut data).await?;
    Ok((kind, data))
}

async fn read(stream: &mut AnyStream, bytes: &mut [u8]) -> Result<(), Failure> {
    stream.read_exact(bytes).await.map(drop).map_err(|error| Failure::new(reason(&error)))
}

async fn write(stream: &mut AnyStream, bytes: &[u8]) -> Result<(), Failure> {
    let written = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    written.await.map_err(|error| Failure::new(reason(&error)))
}

/// The text for an error of a stream.
pub(crate) fn reason(error: &std::io::Error) -> String {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        return "the server has closed the connection".into();
    }
    error.to_string()
}
