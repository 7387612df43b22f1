//! The mechanism of a solid-state disk: dies that work in parallel, each on one operation at a
//! time.
//!
//! A read waits for the die that holds its page, after the die's earlier operations: reads,
//! programs and erases. A write completes when the buffer has accepted it. The buffer is programmed
//! later, one unit of a die after another in rotation. After a die has programmed a block, it
//! erases one. If programs are slower than writes, the buffer fills and writes wait for space in
//! it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Task, transfer_ns};

/// The parameters of a solid-state disk. The defaults are those of an `NVMe` disk with TLC memory;
/// `docs/model.md` has their sources.
#[derive(Clone, Debug, PartialEq)]
pub struct SsdParameters {
    /// The number of channels between the controller and the dies.
    pub channels: usize,
    /// The number of dies on each channel.
    pub dies_per_channel: usize,
    /// The unit of a die's reads, in bytes.
    pub page_size: u64,
    /// The unit of a die's programs (a page on each of its planes), in bytes.
    pub program_size: u64,
    /// The unit of a die's erases (a block on each of its planes), in bytes.
    pub erase_size: u64,
    /// The time to read a page, in nanoseconds.
    pub read_ns: u64,
    /// The time to program a unit, in nanoseconds.
    pub program_ns: u64,
    /// The time to erase a block, in nanoseconds.
    pub erase_ns: u64,
    /// The rate of a channel, in bytes a second.
    pub rate_channel: f64,
    /// The rate of the link to the host, in bytes a second.
    pub rate_link: f64,
    /// The time of controller and protocol for each request, in nanoseconds.
    pub overhead_ns: u64,
    /// The length of writes that are accepted before they are programmed, in bytes.
    pub write_buffer: u64,
    /// The number of bytes programmed for each byte written; at least 1.
    pub write_amplification: f64,
    /// Whether the buffer survives a loss of power, so that a flush completes immediately.
    pub power_loss_protected: bool,
}

impl Default for SsdParameters {
    fn default() -> Self {
        Self::nvme()
    }
}

impl SsdParameters {
    /// An `NVMe` disk of the consumer class.
    pub fn nvme() -> Self {
        Self {
            channels: 8,
            dies_per_channel: 4,
            page_size: 16 << 10,
            program_size: 64 << 10,
            erase_size: 64 << 20,
            read_ns: 55_000,
            program_ns: 700_000,
            erase_ns: 4_000_000,
            rate_channel: 1.2e9,
            rate_link: 3.5e9,
            overhead_ns: 10_000,
            write_buffer: 32 << 20,
            write_amplification: 1.5,
            power_loss_protected: false,
        }
    }

    /// A SATA disk of the consumer class.
    pub fn sata() -> Self {
        Self {
            channels: 4,
            dies_per_channel: 4,
            rate_channel: 0.8e9,
            rate_link: 550e6,
            overhead_ns: 40_000,
            write_buffer: 16 << 20,
            ..Self::nvme()
        }
    }
}

/// A solid-state disk; see the module documentation.
pub(super) struct Ssd {
    parameters: SsdParameters,
    random: fastrand::Rng,
    salt: u64,
    /// The times from which each die, each channel and the link are free, in nanoseconds.
    dies_ns: Vec<u64>,
    channels_ns: Vec<u64>,
    link_ns: u64,
    /// The number of bytes that each die has programmed since its last erase.
    programmed: Vec<u64>,
    /// The die that programs next.
    next_die: usize,
    /// The number of bytes in the buffer, and the times at which parts of them are programmed.
    buffered: u64,
    drains: BinaryHeap<Reverse<(u64, u64)>>,
    /// The number of bytes that do not fill a unit yet, and how many of them the host has written.
    unprogrammed: f64,
    unprogrammed_host: u64,
    /// The time at which all programs so far are complete, in nanoseconds.
    programmed_ns: u64,
}

impl Ssd {
    pub(super) fn new(parameters: SsdParameters, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let channels = parameters.channels.max(1);
        let dies = channels * parameters.dies_per_channel.max(1);
        Self {
            salt: random.u64(..),
            random,
            dies_ns: vec![0; dies],
            channels_ns: vec![0; channels],
            link_ns: 0,
            programmed: vec![0; dies],
            next_die: 0,
            buffered: 0,
            drains: BinaryHeap::new(),
            unprogrammed: 0.0,
            unprogrammed_host: 0,
            programmed_ns: 0,
            parameters,
        }
    }

    /// The completion time of a request that arrives at `now_ns`, in nanoseconds.
    pub(super) fn arrive(&mut self, task: Task, offset: u64, length: u64, now_ns: u64) -> u64 {
        let start_ns = now_ns + self.parameters.overhead_ns;
        match task {
            Task::Read => self.read(offset, length, start_ns),
            Task::Write(durable) => self.write(length, durable, start_ns),
            Task::Flush if self.parameters.power_loss_protected => start_ns,
            Task::Flush => {
                self.program_rest(start_ns);
                self.programmed_ns.max(start_ns)
            }
            Task::Deallocate => start_ns,
        }
    }

    fn read(&mut self, offset: u64, length: u64, start_ns: u64) -> u64 {
        let page_size = self.parameters.page_size;
        let link_ns = transfer_ns(length, self.parameters.rate_link);
        let mut ready_ns = start_ns;
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let page = at / page_size;
            let piece = ((page + 1) * page_size).min(end) - at;
            let die = self.die_of(page);
            let sense_ns = self.vary(self.parameters.read_ns);
            let sensed_ns = self.dies_ns[die].max(start_ns) + sense_ns;
            self.dies_ns[die] = sensed_ns;
            let channel = die % self.channels_ns.len();
            let piece_ns = transfer_ns(piece, self.parameters.rate_channel);
            let channel_ns = self.channels_ns[channel].max(start_ns) + piece_ns;
            self.channels_ns[channel] = channel_ns;
            // The channel's time is reserved when the request arrives, and the request waits for
            // both. So a page that is ready later does not delay one that is ready sooner.
            ready_ns = ready_ns.max(channel_ns.max(sensed_ns + piece_ns));
            at += piece;
        }
        self.link_ns = self.link_ns.max(start_ns) + link_ns;
        self.link_ns.max(ready_ns + link_ns)
    }

    fn write(&mut self, length: u64, durable: bool, start_ns: u64) -> u64 {
        self.link_ns = self.link_ns.max(start_ns) + transfer_ns(length, self.parameters.rate_link);
        let received_ns = self.link_ns;
        let mut taken_ns = received_ns;
        // Bytes that are programmed by then have left the buffer.
        while let Some(&Reverse((drained_ns, bytes))) = self.drains.peek() {
            let full = self.buffered + length > self.parameters.write_buffer;
            if drained_ns > received_ns && !full {
                break;
            }
            self.drains.pop();
            self.buffered -= bytes;
            taken_ns = taken_ns.max(drained_ns);
        }
        self.buffered += length;
        self.unprogrammed_host += length;
        self.unprogrammed += length as f64 * self.parameters.write_amplification.max(1.0);
        let unit = self.parameters.program_size;
        while self.unprogrammed >= unit as f64 {
            self.unprogrammed -= unit as f64;
            self.program(taken_ns);
        }
        if durable && !self.parameters.power_loss_protected {
            self.program_rest(taken_ns);
            return self.programmed_ns.max(taken_ns);
        }
        taken_ns
    }

    /// Programs the bytes that do not fill a unit.
    fn program_rest(&mut self, now_ns: u64) {
        if self.unprogrammed > 0.0 {
            self.unprogrammed = 0.0;
            self.program(now_ns);
        }
    }

    /// Programs one unit on the next die.
    fn program(&mut self, now_ns: u64) {
        let die = self.next_die;
        self.next_die = (die + 1) % self.dies_ns.len();
        let unit = self.parameters.program_size;
        let channel = die % self.channels_ns.len();
        let unit_ns = transfer_ns(unit, self.parameters.rate_channel);
        self.channels_ns[channel] = self.channels_ns[channel].max(now_ns) + unit_ns;
        let program_ns = self.vary(self.parameters.program_ns);
        let begin_ns = self.dies_ns[die].max(now_ns + unit_ns);
        let mut done_ns = begin_ns + program_ns;
        self.programmed_ns = self.programmed_ns.max(done_ns);
        let share = (unit as f64 / self.parameters.write_amplification.max(1.0)).ceil() as u64;
        let bytes = self.unprogrammed_host.min(share);
        self.unprogrammed_host -= bytes;
        self.drains.push(Reverse((done_ns, bytes)));
        self.programmed[die] += unit;
        if self.programmed[die] >= self.parameters.erase_size {
            self.programmed[die] = 0;
            done_ns += self.vary(self.parameters.erase_ns);
        }
        self.dies_ns[die] = done_ns;
    }

    /// The die that holds a page: adjacent pages are on different dies, in an order that depends on
    /// the seed.
    fn die_of(&self, page: u64) -> usize {
        let dies = self.dies_ns.len() as u64;
        let (row, column) = (page / dies, page % dies);
        let shift = (row ^ self.salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((column + shift) % dies) as usize
    }

    /// A time with a variation of up to a tenth.
    fn vary(&mut self, time_ns: u64) -> u64 {
        (time_ns as f64 * (0.9 + 0.2 * self.random.f64())) as u64
    }
}
