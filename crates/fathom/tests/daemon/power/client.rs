//! A client that writes, flushes and reads until it is stopped, checks what it reads, and connects
//! again when the daemon has ended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::drawn;
use super::history::{self, BLOCK, History, Kind, data};
use super::recorder::Recorder;
use crate::nbd::Nbd;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_FLUSH: u16 = 3;
const COMMAND_TRIM: u16 = 4;
const COMMAND_WRITE_ZEROES: u16 = 6;
const FLAG_FUA: u16 = 1;
/// The most requests in flight.
const DEPTH: u64 = 12;
/// How many instants of the record a message shows.
const TRACE_LENGTH: usize = 8000;
const PAUSE: Duration = Duration::from_millis(2);

/// What the clients of a disk know, and the record of the devices.
#[derive(Clone)]
pub struct Shared {
    pub recorder: Recorder,
    history: Arc<Mutex<History>>,
    stop: Arc<AtomicBool>,
    /// How many requests were carried out, and how many failed.
    counts: Arc<Mutex<(u64, u64)>>,
}

impl Shared {
    pub fn new(recorder: Recorder, blocks: usize) -> Self {
        Self {
            recorder,
            history: Arc::new(Mutex::new(History::new(blocks))),
            stop: Arc::default(),
            counts: Arc::default(),
        }
    }

    pub fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock()
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn counts(&self) -> (u64, u64) {
        *self.counts.lock()
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Uses the disk "a" at `socket`, in the blocks of which the index is `lane` modulo `lanes`, until
/// it is stopped.
///
/// # Errors
/// If a read finds what cannot be there.
pub fn run(
    shared: &Shared,
    socket: &Path,
    (lane, lanes): (usize, usize),
    blocks: usize,
    random: fastrand::Rng,
) -> Result<(), String> {
    // Some clients flush rarely.
    let mut random = random;
    let flush_interval = [4, 60][random.usize(0..2)];
    let socket = socket.to_owned();
    let mut client =
        Client { shared, socket, nbd: None, random, flush_interval, lane, lanes, blocks };
    while !shared.is_stopped() {
        client.round()?;
    }
    Ok(())
}

struct Client<'s> {
    shared: &'s Shared,
    socket: PathBuf,
    nbd: Option<Nbd>,
    random: fastrand::Rng,
    /// One of so many rounds has a flush.
    flush_interval: u64,
    lane: usize,
    lanes: usize,
    blocks: usize,
}

impl Client<'_> {
    /// Some requests for different blocks, which are all in flight at once.
    fn round(&mut self) -> Result<(), String> {
        let Some(mut nbd) = self.nbd.take().or_else(|| Nbd::try_connect(&self.socket, "a").ok())
        else {
            std::thread::sleep(PAUSE);
            return Ok(());
        };
        let count = 1 + self.random.u64(0..DEPTH);
        let mut sent: BTreeMap<usize, u16> = BTreeMap::new();
        let mut flush = None;
        let begun = self.shared.recorder.now();
        let mut is_open = true;
        for _ in 0..count {
            let block = self.block();
            if sent.contains_key(&block) || !is_open {
                continue;
            }
            let (kind, flags, content) = self.choose(block);
            sent.insert(block, kind);
            let offset = (block * BLOCK) as u64;
            is_open = nbd.send_with(flags, kind, block as u64, offset, BLOCK as u32, &content);
        }
        // It covers what was acknowledged in earlier rounds.
        if is_open && self.random.u64(0..self.flush_interval) == 0 {
            flush = Some(self.shared.recorder.now());
            is_open = nbd.send(COMMAND_FLUSH, u64::MAX, 0, 0, &[]);
        }
        let mut missing = sent.len() + usize::from(flush.is_some());
        while is_open && missing > 0 {
            let Some((cookie, error)) = nbd.reply() else { break };
            missing -= 1;
            let now = self.shared.recorder.now();
            {
                let mut counts = self.shared.counts.lock();
                *(if error == 0 { &mut counts.0 } else { &mut counts.1 }) += 1;
            }
            if cookie == u64::MAX {
                if let (Some(begun), 0) = (flush, error) {
                    self.shared.history().flushed(begun, now);
                }
                continue;
            }
            let block = cookie as usize;
            match (sent[&block], error) {
                (COMMAND_READ, 0) => {
                    let Some(content) = nbd.data(BLOCK) else { break };
                    let found = self.shared.history().read(block, &content, (begun, now));
                    found.map_err(|error| {
                        let find = |sector: &[u8]| {
                            history::number(block, sector)
                                .filter(|_| history::is_of(&[block], sector))
                        };
                        let first = now.saturating_sub(TRACE_LENGTH);
                        let trace = self.shared.recorder.trace(first..now, find).join("\n  ");
                        format!("a read since {begun} at {now}: {error}\n  {trace}")
                    })?;
                }
                (COMMAND_READ, _) => {}
                (_, 0) => self.shared.history().acknowledge(block, now),
                // It may have had an effect or not.
                _ => {}
            }
        }
        if is_open && missing == 0 {
            self.nbd = Some(nbd);
        }
        Ok(())
    }

    /// Most requests are for a few blocks.
    fn block(&mut self) -> usize {
        let lane_blocks = (self.blocks / self.lanes) as u64;
        let range = if self.random.u64(0..3) > 0 { lane_blocks.min(24) } else { lane_blocks };
        self.random.u64(0..range) as usize * self.lanes + self.lane
    }

    fn choose(&mut self, block: usize) -> (u16, u16, Vec<u8>) {
        let choice = self.random.u64(0..20);
        if choice < 8 {
            return (COMMAND_READ, 0, Vec::new());
        }
        let kind = match choice {
            19 => Kind::Zeroes,
            18 => Kind::DurableWrite,
            17 => Kind::Discard,
            _ => Kind::Write,
        };
        let now = self.shared.recorder.now();
        let content = self.shared.history().write(block, kind, now);
        match kind {
            Kind::Zeroes => (COMMAND_WRITE_ZEROES, 0, Vec::new()),
            Kind::Discard => {
                drawn::note("discard");
                (COMMAND_TRIM, 0, Vec::new())
            }
            Kind::DurableWrite => (COMMAND_WRITE, FLAG_FUA, data(block, content)),
            Kind::Write => (COMMAND_WRITE, 0, data(block, content)),
        }
    }
}
