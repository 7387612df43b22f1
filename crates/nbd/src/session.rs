//! One connection: requests are sent as they come, and replies come in any order.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::time::Duration;

use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, BufWriter,
};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::time::timeout;

use crate::handshake::reason;
use crate::job::{Asked, Job, JobList};
use crate::stream::AnyStream;
use crate::wire::{RequestHeader, SIMPLE_REPLY_LENGTH, SimpleReply, command, error};

/// The bytes of small requests that are sent together.
const BUFFER: usize = 64 << 10;

/// Why a connection ended.
pub(crate) enum End {
    /// Nobody needs it any more.
    Closed,
    /// It failed.
    Failed(String),
}

/// What the parts of a session wait for.
#[derive(Default)]
struct Signals {
    /// A request has completed.
    completed: Notify,
    /// A request has been sent.
    sent: Notify,
}

/// Sends `jobs`, and before them what an earlier connection left, until the connection ends.
pub(crate) async fn run(
    stream: AnyStream,
    state: &RefCell<JobList>,
    jobs: &mut UnboundedReceiver<Job>,
) -> End {
    let (reader, writer) = tokio::io::split(stream);
    let signals = Signals::default();
    tokio::select! {
        end = read_replies(BufReader::with_capacity(BUFFER, reader), state, &signals) => match end {
            Err(text) => End::Failed(text),
        },
        end = write_requests(BufWriter::with_capacity(BUFFER, writer), state, jobs, &signals) => {
            match end {
                Ok(()) => End::Closed,
                Err(error) => End::Failed(reason(&error)),
            }
        },
        () = expire(state, &signals) => End::Failed(SILENT.into()),
    }
}

/// Repeats what an earlier connection left before anything else can be read: the changes that were
/// acknowledged and perhaps lost, and then those that were in flight. They are sent one after the
/// other, because one may replace another.
pub(crate) async fn repeat(stream: &mut AnyStream, state: &RefCell<JobList>) -> Result<(), String> {
    let acknowledged = state.borrow().unflushed_within();
    for asked in &acknowledged {
        let cookie = state.borrow_mut().cookie();
        if repeat_one(stream, asked, cookie).await? != 0 {
            state.borrow_mut().lose();
            break;
        }
    }
    let in_flight = state.borrow().sent_changes();
    for cookie in in_flight {
        let asked = state.borrow_mut().send(cookie);
        if let Some(asked) = asked {
            let error = repeat_one(stream, &asked, cookie).await?;
            state.borrow_mut().complete(cookie, error, Vec::new());
        }
    }
    Ok(())
}

/// Flushes what an earlier daemon has left. Returns whether that has succeeded.
pub(crate) async fn flush_earlier(stream: &mut AnyStream, limit: Duration) -> Result<bool, String> {
    Ok(ask_within(stream, &Asked::flush(), 0, limit).await? == 0)
}

/// Returns the server's error, or 0.
async fn repeat_one(stream: &mut AnyStream, asked: &Asked, cookie: u64) -> Result<u32, String> {
    ask_within(stream, asked, cookie, ANSWER_TIME_MAX).await
}

async fn ask_within(
    stream: &mut AnyStream,
    asked: &Asked,
    cookie: u64,
    limit: Duration,
) -> Result<u32, String> {
    let reply = async {
        send(stream, asked, cookie).await?;
        stream.flush().await?;
        let mut header = [0; SIMPLE_REPLY_LENGTH];
        stream.read_exact(&mut header).await?;
        Ok(header)
    };
    let header = timeout(limit, reply).await.map_err(|_| SILENT.to_owned())?;
    let header = header.map_err(|error: io::Error| reason(&error))?;
    match SimpleReply::parse(&header).filter(|reply| reply.cookie == cookie) {
        Some(reply) if reply.error == error::SHUTDOWN => Err(SHUTS_DOWN.into()),
        Some(reply) => Ok(reply.error),
        None => Err(INVALID.into()),
    }
}

/// How long a repeated request takes at most, before the connection is given up.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
pub(crate) const SILENT: &str = "the server does not answer";
const INVALID: &str = "the server's reply is invalid";
const SHUTS_DOWN: &str = "the server shuts down";

async fn send<W: AsyncWrite + Unpin>(writer: &mut W, asked: &Asked, cookie: u64) -> io::Result<()> {
    writer.write_all(&asked.header(cookie).encode()).await?;
    writer.write_all(&asked.data).await
}

/// Reads replies until the connection fails.
async fn read_replies<R: AsyncRead + Unpin>(
    mut reader: R,
    state: &RefCell<JobList>,
    signals: &Signals,
) -> Result<Infallible, String> {
    loop {
        read_reply(&mut reader, state).await?;
        signals.completed.notify_one();
    }
}

/// Reads a reply.
pub(crate) async fn read_reply<R: AsyncRead + Unpin>(
    reader: &mut R,
    state: &RefCell<JobList>,
) -> Result<(), String> {
    let mut header = [0; SIMPLE_REPLY_LENGTH];
    reader.read_exact(&mut header).await.map_err(|error| reason(&error))?;
    let reply = SimpleReply::parse(&header).ok_or(INVALID)?;
    let length = state.borrow().payload(reply.cookie).ok_or(INVALID)?;
    if reply.error == error::SHUTDOWN {
        return Err(SHUTS_DOWN.into());
    }
    let mut bytes = vec![0; if reply.error == 0 { length } else { 0 }];
    reader.read_exact(&mut bytes).await.map_err(|error| reason(&error))?;
    state.borrow_mut().complete(reply.cookie, reply.error, bytes);
    Ok(())
}

/// Sends requests until nobody has any, and all have completed.
async fn write_requests<W: AsyncWrite + Unpin>(
    mut writer: W,
    state: &RefCell<JobList>,
    jobs: &mut UnboundedReceiver<Job>,
    signals: &Signals,
) -> io::Result<()> {
    let left = state.borrow().cookies();
    let mut is_closed = false;
    for cookie in left {
        transmit(&mut writer, state, cookie, signals).await?;
    }
    loop {
        let released = state.borrow_mut().release();
        if let Some(cookie) = released {
            transmit(&mut writer, state, cookie, signals).await?;
            continue;
        }
        let own = state.borrow_mut().own_flush();
        let is_full = state.borrow().unflushed.is_full();
        let next = match own {
            Some(flush) => Some(flush),
            None if is_full || is_closed => None,
            None => match jobs.try_recv() {
                Ok(job) => Some(job),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => {
                    is_closed = true;
                    None
                }
            },
        };
        let job = if let Some(job) = next {
            job
        } else {
            writer.flush().await?;
            if is_closed && state.borrow().is_idle() {
                let last = state.borrow_mut().last_flush();
                let cookie = last.and_then(|job| state.borrow_mut().admit(job));
                if let Some(cookie) = cookie {
                    transmit(&mut writer, state, cookie, signals).await?;
                    continue;
                }
                let (flags, command, cookie) = (0, command::DISCONNECT, 0);
                let header = RequestHeader { flags, command, cookie, offset: 0, length: 0 };
                writer.write_all(&header.encode()).await?;
                return writer.flush().await;
            }
            tokio::select! {
                () = signals.completed.notified() => continue,
                job = jobs.recv(), if !is_full && !is_closed => {
                    let Some(job) = job else {
                        is_closed = true;
                        continue;
                    };
                    job
                }
            }
        };
        let cookie = state.borrow_mut().admit(job);
        if let Some(cookie) = cookie {
            transmit(&mut writer, state, cookie, signals).await?;
        }
    }
}

async fn transmit<W: AsyncWrite + Unpin>(
    writer: &mut W,
    state: &RefCell<JobList>,
    cookie: u64,
    signals: &Signals,
) -> io::Result<()> {
    let asked = state.borrow_mut().send(cookie);
    let Some(asked) = asked else { return Ok(()) };
    signals.sent.notify_one();
    send(writer, &asked, cookie).await
}

/// Returns when a request has not completed in time. It has failed then.
async fn expire(state: &RefCell<JobList>, signals: &Signals) {
    loop {
        let deadline = state.borrow().deadline();
        match deadline {
            None => signals.sent.notified().await,
            Some(deadline) => {
                tokio::time::sleep_until(deadline).await;
                if state.borrow_mut().expire() {
                    return;
                }
            }
        }
    }
}
