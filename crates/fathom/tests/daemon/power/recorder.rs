//! A server of block devices that records what it is asked to write and to flush, so that the
//! content of all of them after a power loss at any instant can be made.
//!
//! The instants of all devices are one sequence: the positions in the record. A power loss keeps,
//! of each device by itself, what a completed flush covered, and a random part of the rest, by
//! sector.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

/// The unit in which a device tears writes, in bytes.
pub const SECTOR: usize = 512;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 0x8000_0001;
/// Flushes, durable writes, and several connections of which each flush covers all.
const FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 8;
const COMMAND_FLAG_FUA: u16 = 1;
const IO_ERROR: u32 = 5;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const LENGTH_MAX: u32 = 32 << 20;

/// Whether a sector of a write cannot be written.
pub type Fault = Box<dyn Fn(&[u8]) -> bool + Send>;

/// What happened at one instant.
enum Event {
    /// A write began. `is_durable` is whether it is durable once it has completed.
    Write { device: usize, offset: usize, data: Vec<u8>, is_durable: bool },
    /// The write that began at this instant has completed.
    Written(usize),
    /// Something else happened, or a flush began.
    Mark,
    /// The flush of a device that began at this instant has completed.
    Flushed { device: usize, begun: usize },
}

struct Device {
    content: Vec<u8>,
    /// The content at the beginning of the record.
    base: Vec<u8>,
    fault: Option<Fault>,
    /// Whether its flushes fail.
    fails_flushes: bool,
    /// The bytes at its beginning that a write changes as a whole or not at all.
    whole: usize,
}

#[derive(Default)]
struct Record {
    devices: Vec<Device>,
    events: Vec<Event>,
    /// How many writes and flushes have failed.
    failed: usize,
}

impl Record {
    /// A write begins. Returns its instant.
    fn write(&mut self, device: usize, offset: usize, data: Vec<u8>, is_durable: bool) -> usize {
        let begun = self.events.len();
        self.devices[device].content[offset..offset + data.len()].copy_from_slice(&data);
        self.events.push(Event::Write { device, offset, data, is_durable });
        begun
    }
}

/// The devices and their record.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<Record>>);

impl Recorder {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.0.lock()
    }

    /// Adds a device of `size` bytes, which is served at the socket `path`. Returns its number.
    pub fn serve(&self, path: &Path, size: usize) -> usize {
        let listener = UnixListener::bind(path).unwrap();
        let mut record = self.record();
        let device = record.devices.len();
        let content = vec![0; size];
        record.devices.push(Device {
            base: Vec::new(),
            content,
            fault: None,
            fails_flushes: false,
            whole: 0,
        });
        drop(record);
        let recorder = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let recorder = recorder.clone();
                std::thread::spawn(move || recorder.session(device, size, stream));
            }
        });
        device
    }

    /// The first bytes of a device are not torn: ext4 cannot be mounted with a torn superblock, of
    /// which it has to know where its journal is.
    pub fn keep_whole(&self, device: usize, bytes: usize) {
        self.record().devices[device].whole = bytes;
    }

    /// A new instant.
    pub fn now(&self) -> usize {
        let mut record = self.record();
        record.events.push(Event::Mark);
        record.events.len()
    }

    /// Begins a new record. All devices are idle, and what they have is durable.
    pub fn begin(&self) {
        let mut record = self.record();
        record.events.clear();
        for device in &mut record.devices {
            device.base.clone_from(&device.content);
        }
    }

    /// The content of each device after a power loss at `instant`. `keeps` decides for a device and
    /// a sector whether it has got a write that no flush covers.
    pub fn after_power_loss(
        &self,
        instant: usize,
        mut keeps: impl FnMut(usize) -> bool,
    ) -> Vec<Vec<u8>> {
        let record = self.record();
        let events = &record.events[..instant];
        let mut written = vec![usize::MAX; events.len()];
        let mut covered = vec![0; record.devices.len()];
        for (at, event) in events.iter().enumerate() {
            match event {
                Event::Written(begun) => written[*begun] = at,
                Event::Flushed { device, begun } => {
                    covered[*device] = (*begun).max(covered[*device]);
                }
                Event::Write { .. } | Event::Mark => {}
            }
        }
        let mut contents: Vec<Vec<u8>> =
            record.devices.iter().map(|device| device.base.clone()).collect();
        for (at, event) in events.iter().enumerate() {
            let Event::Write { device, offset, data, is_durable } = event else { continue };
            let is_kept =
                written[at] < covered[*device] || (*is_durable && written[at] != usize::MAX);
            let mut keeps_beginning = None;
            for (index, sector) in data.chunks(SECTOR).enumerate() {
                let start = offset + index * SECTOR;
                let is_kept = is_kept
                    || if start < record.devices[*device].whole {
                        *keeps_beginning.get_or_insert_with(|| keeps(*device))
                    } else {
                        keeps(*device)
                    };
                if is_kept {
                    contents[*device][start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        contents
    }

    /// Gives an idle device another content, and ends its record.
    pub fn restore(&self, device: usize, content: Vec<u8>) {
        self.record().devices[device].content = content;
    }

    /// From now on, the writes to `device` of which `fault` finds a sector fail. Their other
    /// sectors are written.
    pub fn fail(&self, device: usize, fault: Fault) {
        self.record().devices[device].fault = Some(fault);
    }

    /// From now on, the flushes of `device` fail: nobody knows what they have made durable.
    pub fn fail_flushes(&self, device: usize) {
        self.record().devices[device].fails_flushes = true;
    }

    /// No write and no flush fails any more. Returns how many have failed.
    pub fn mend(&self) -> usize {
        let mut record = self.record();
        for device in &mut record.devices {
            (device.fault, device.fails_flushes) = (None, false);
        }
        std::mem::take(&mut record.failed)
    }

    /// The writes that have a sector of which `find` knows what is in it, and the flushes, in
    /// `instants`: for messages.
    pub fn trace(
        &self,
        instants: std::ops::Range<usize>,
        find: impl Fn(&[u8]) -> Option<u32>,
    ) -> Vec<String> {
        let record = self.record();
        let events = record.events.iter().enumerate();
        let events = events.skip(instants.start).take(instants.len());
        let lines = events.filter_map(|(at, event)| match event {
            Event::Write { device, offset, data, is_durable } => {
                let found: Vec<_> = data.chunks(SECTOR).filter_map(&find).collect();
                let (length, durable) = (data.len(), if *is_durable { " durably" } else { "" });
                let first = found.first()?;
                Some(format!("{at}: {first} to {device} at {offset} + {length}{durable}"))
            }
            Event::Flushed { device, begun } => {
                Some(format!("{at}: {device} is flushed since {begun}"))
            }
            Event::Written(_) | Event::Mark => None,
        });
        lines.collect()
    }

    /// Frees the record: the threads that serve the devices keep it.
    pub fn end(&self) {
        *self.record() = Record::default();
    }

    /// The bytes written to each device since the beginning of the record.
    pub fn written(&self) -> Vec<usize> {
        let record = self.record();
        let mut bytes = vec![0; record.devices.len()];
        for event in &record.events {
            if let Event::Write { device, data, .. } = event {
                bytes[*device] += data.len();
            }
        }
        bytes
    }

    fn session(&self, device: usize, size: usize, mut stream: UnixStream) {
        // The client ends a session by closing it.
        let _ = negotiate(&mut stream, size).and_then(|is_open| {
            if is_open { self.transmit(device, size, &mut stream) } else { Ok(()) }
        });
    }

    fn transmit(&self, device: usize, size: usize, stream: &mut UnixStream) -> io::Result<()> {
        loop {
            let head: [u8; 28] = array(stream)?;
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            assert_eq!(number(0), REQUEST_MAGIC);
            let flags = u16::from_be_bytes(head[4..6].try_into().unwrap());
            let kind = u16::from_be_bytes(head[6..8].try_into().unwrap());
            let offset = u64::from_be_bytes(head[16..24].try_into().unwrap()) as usize;
            let length = number(24) as usize;
            assert!(length <= LENGTH_MAX as usize && offset + length <= size);
            let mut answer = Vec::new();
            let mut error: u32 = 0;
            match kind {
                0 => answer = self.record().devices[device].content[offset..][..length].to_vec(),
                1 => {
                    let mut data = vec![0; length];
                    stream.read_exact(&mut data)?;
                    if !self.write(device, offset, data, flags & COMMAND_FLAG_FUA != 0) {
                        error = IO_ERROR;
                    }
                }
                2 => return Ok(()),
                3 if !self.flush(device) => error = IO_ERROR,
                3 => {}
                other => panic!("command {other}"),
            }
            let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
            reply.extend(error.to_be_bytes());
            reply.extend(&head[8..16]);
            reply.extend(answer);
            stream.write_all(&reply)?;
        }
    }

    /// Returns whether it has succeeded.
    fn write(&self, device: usize, offset: usize, data: Vec<u8>, is_durable: bool) -> bool {
        let mut record = self.record();
        if let Some(fault) = &record.devices[device].fault {
            let sound: Vec<_> = data.chunks(SECTOR).map(|sector| !fault(sector)).collect();
            if sound.contains(&false) {
                record.failed += 1;
                for (index, sector) in data.chunks(SECTOR).enumerate().filter(|it| sound[it.0]) {
                    let begun =
                        record.write(device, offset + index * SECTOR, sector.to_vec(), false);
                    record.events.push(Event::Written(begun));
                }
                return false;
            }
        }
        let begun = record.write(device, offset, data, is_durable);
        drop(record);
        // Others may begin and complete meanwhile.
        std::thread::yield_now();
        self.record().events.push(Event::Written(begun));
        true
    }

    /// Returns whether it has succeeded.
    fn flush(&self, device: usize) -> bool {
        let mut record = self.record();
        if record.devices[device].fails_flushes {
            record.failed += 1;
            return false;
        }
        let begun = record.events.len();
        record.events.push(Event::Mark);
        drop(record);
        std::thread::yield_now();
        self.record().events.push(Event::Flushed { device, begun });
        true
    }
}

/// Returns whether the client wants the device.
fn negotiate(stream: &mut UnixStream, size: usize) -> io::Result<bool> {
    stream.write_all(b"NBDMAGICIHAVEOPT")?;
    stream.write_all(&3_u16.to_be_bytes())?;
    let _: [u8; 4] = array(stream)?;
    loop {
        let head: [u8; 16] = array(stream)?;
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        let (option, length) = (number(8), number(12));
        let mut data = vec![0; length.min(LENGTH_MAX) as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut reply = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            reply.extend(option.to_be_bytes());
            reply.extend(kind.to_be_bytes());
            reply.extend((data.len() as u32).to_be_bytes());
            reply.extend(data);
            stream.write_all(&reply)
        };
        let mut properties = (size as u64).to_be_bytes().to_vec();
        properties.extend(FLAGS.to_be_bytes());
        match option {
            OPTION_EXPORT_NAME => {
                // The client has agreed to no zeroes.
                stream.write_all(&properties)?;
                return Ok(true);
            }
            OPTION_ABORT => {
                reply(REPLY_ACK, &[])?;
                return Ok(false);
            }
            OPTION_INFO | OPTION_GO => {
                let mut information = vec![0, 0];
                information.extend(properties);
                reply(REPLY_INFO, &information)?;
                reply(REPLY_ACK, &[])?;
                if option == OPTION_GO {
                    return Ok(true);
                }
            }
            _ => reply(REPLY_UNSUPPORTED, &[])?,
        }
    }
}

fn array<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    stream.read_exact(&mut array)?;
    Ok(array)
}
