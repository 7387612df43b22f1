//! What a client has written and flushed, and so what each block may hold: now, and after a power
//! loss at any instant.

/// The size of a block, in bytes.
pub const BLOCK: usize = 4096;
const SECTOR: usize = 512;
/// The instant of what has not happened.
const NEVER: usize = usize::MAX;

#[derive(Clone, Copy)]
struct Write {
    content: u32,
    begun: usize,
    acknowledged: usize,
    is_durable: bool,
    /// Whether it is a discard: from then on, the block may have any earlier content or zeroes, and
    /// another one each time, until it is written again.
    is_discard: bool,
    /// When it was found that it has had no effect.
    gone: usize,
}

/// What a client does to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Write,
    DurableWrite,
    Zeroes,
    Discard,
}

/// The history of one disk. All blocks begin with the content 0.
pub struct History {
    /// The writes of each block, in order: no two of a block are in flight at once.
    blocks: Vec<Vec<Write>>,
    /// The instants at which successful flushes began and were acknowledged.
    flushes: Vec<(usize, usize)>,
    contents: u32,
    /// Whether devices fail, so that what was acknowledged and not flushed may be lost.
    is_failing: bool,
    /// The instant from which nothing is lost any more.
    mended: usize,
}

impl History {
    pub fn new(blocks: usize) -> Self {
        let first = Write {
            content: 0,
            begun: 0,
            acknowledged: 0,
            is_durable: true,
            is_discard: false,
            gone: NEVER,
        };
        Self {
            blocks: vec![vec![first]; blocks],
            flushes: Vec::new(),
            contents: 0,
            is_failing: false,
            mended: 0,
        }
    }

    /// Devices fail from now on.
    pub fn begin_failures(&mut self) {
        self.is_failing = true;
    }

    /// Devices do not fail any more. `is_lost` is whether a flush has reported that: what was not
    /// flushed then may be there or not, and no later flush makes it durable unless it is found
    /// before.
    pub fn end_failures(&mut self, is_lost: bool, now: usize) {
        self.is_failing = false;
        if !is_lost {
            return;
        }
        self.mended = now;
        let covered = self.covered(usize::MAX, 0);
        for write in self.blocks.iter_mut().flatten() {
            if write.acknowledged > covered && !write.is_durable {
                write.acknowledged = NEVER;
            }
        }
    }

    /// The latest beginning of a flush that was acknowledged by `instant`, without the last `lost`
    /// of these.
    fn covered(&self, instant: usize, lost: usize) -> usize {
        let mut honoured: Vec<(usize, usize)> = self
            .flushes
            .iter()
            .map(|(begun, acknowledged)| (*acknowledged, *begun))
            .filter(|(acknowledged, _)| *acknowledged <= instant)
            .collect();
        honoured.sort_unstable();
        honoured.truncate(honoured.len().saturating_sub(lost));
        honoured.iter().map(|(_, begun)| *begun).max().unwrap_or(0)
    }

    /// The last writes of `block` before `instant`: content, and the instants of their beginning
    /// and acknowledgement.
    fn recent(&self, block: usize, instant: usize) -> String {
        let writes = self.blocks[block].iter().filter(|write| write.begun <= instant);
        let shown: Vec<_> = writes
            .map(|write| {
                let durable = if write.is_durable { " durably" } else { "" };
                let durable = if write.is_discard { " (a discard)" } else { durable };
                let acknowledged = match write.acknowledged {
                    NEVER => "?".to_owned(),
                    instant => instant.to_string(),
                };
                format!("{} at {}..{acknowledged}{durable}", write.content, write.begun)
            })
            .collect();
        shown[shown.len().saturating_sub(12)..].join(", ")
    }

    /// A write of `block` begins. Returns its content: another one for each write, or zeroes.
    pub fn write(&mut self, block: usize, kind: Kind, now: usize) -> u32 {
        self.contents += 1;
        let is_zeroes = matches!(kind, Kind::Zeroes | Kind::Discard);
        let content = if is_zeroes { 0 } else { self.contents };
        self.blocks[block].push(Write {
            content,
            begun: now,
            acknowledged: NEVER,
            is_durable: kind == Kind::DurableWrite,
            is_discard: kind == Kind::Discard,
            gone: NEVER,
        });
        content
    }

    /// The last write of `block` is acknowledged.
    pub fn acknowledge(&mut self, block: usize, now: usize) {
        let write = self.blocks[block].last_mut().unwrap();
        // Failures have ended meanwhile, and it may have been before.
        if write.begun >= self.mended && !write.is_discard {
            write.acknowledged = now;
        }
    }

    pub fn flushed(&mut self, begun: usize, acknowledged: usize) {
        self.flushes.push((begun, acknowledged));
    }

    /// A read that began at `begun` has found `content` in `block`, in which nothing is in flight.
    ///
    /// # Errors
    /// If it cannot be there.
    pub fn read(
        &mut self,
        block: usize,
        content: &[u8],
        (begun, now): (usize, usize),
    ) -> Result<(), String> {
        let is_failing = self.is_failing || begun < self.mended;
        let covered = if is_failing { self.covered(now, 0) } else { NEVER - 1 };
        let writes = &mut self.blocks[block];
        let is_sure = |write: &Write| {
            write.acknowledged <= covered || (write.is_durable && write.acknowledged != NEVER)
        };
        let last = writes.iter().rposition(is_sure).unwrap();
        let Some(found) = number(block, content) else {
            return Err(format!("block {block} is torn or foreign"));
        };
        if writes[last..].iter().any(|write| write.is_discard) {
            let is_known = writes.iter().any(|write| write.content == found);
            return if is_known {
                Ok(())
            } else {
                Err(format!("block {block} has {found}, which it never had"))
            };
        }
        let fits = |write: &Write| write.content == found && write.gone == NEVER;
        let Some(at) = writes[last..].iter().rposition(fits) else {
            let writes = self.recent(block, now);
            return Err(format!("block {block} has {found}, and may not, of {writes}"));
        };
        // It is in the page cache, and may not be there later.
        if is_failing {
            return Ok(());
        }
        // What was not acknowledged either stays or does not appear later.
        for (index, write) in writes.iter_mut().enumerate().skip(last + 1) {
            match index == last + at {
                true => write.acknowledged = now,
                false if write.gone == NEVER => write.gone = now,
                false => {}
            }
        }
        Ok(())
    }

    /// Which writes are durable after a power loss at `instant`, at which the last `lost` flushes
    /// and durable writes may have been in vain.
    fn coverage(&self, instant: usize, lost: usize) -> impl Fn(&Write) -> bool + use<> {
        let covered = self.covered(instant, lost);
        move |write| {
            write.acknowledged <= if write.is_durable && lost == 0 { instant } else { covered }
        }
    }

    /// Whether a discard may be the newest change of `block` after a power loss at `instant`, at
    /// which the last `lost` flushes may have been in vain. It may have another content without a
    /// cache or a log then.
    pub fn is_discarded(&self, block: usize, (instant, lost): (usize, usize)) -> bool {
        let is_covered = self.coverage(instant, lost);
        let writes = self.blocks[block].iter().filter(|write| write.begun <= instant);
        // One that was written later may be lost.
        writes.fold(false, |is, write| (is && !is_covered(write)) || write.is_discard)
    }

    /// Checks the content of the disk after a power loss at `instant`, at which the last `lost`
    /// flushes and durable writes may have been in vain, but for the block `rotten`.
    ///
    /// # Errors
    /// The first block with content that cannot be there, and what is wrong.
    pub fn check(
        &self,
        (instant, lost): (usize, usize),
        rotten: Option<usize>,
        disk: &[u8],
    ) -> Result<(), (usize, String)> {
        let is_covered = self.coverage(instant, lost);
        let mut wrong = Vec::new();
        let blocks = self.blocks.iter().enumerate();
        for (block, writes) in blocks.filter(|(block, _)| Some(*block) != rotten) {
            let first = writes.iter().rposition(&is_covered).unwrap_or(0);
            let is_discarded =
                writes[first..].iter().any(|write| write.is_discard && write.begun <= instant);
            let first = if is_discarded { 0 } else { first };
            let can_be =
                |write: &&Write| write.begun <= instant && (write.gone > instant || is_discarded);
            let may: Vec<u32> =
                writes[first..].iter().filter(can_be).map(|write| write.content).collect();
            for sector in disk[block * BLOCK..][..BLOCK].chunks(SECTOR) {
                let found = number(block, sector);
                if !found.is_some_and(|found| may.contains(&found)) {
                    wrong.push((block, found, may));
                    break;
                }
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let first = wrong[0].0;
        wrong.truncate(8);
        let wrong: Vec<_> = wrong
            .into_iter()
            .map(|(block, found, may)| {
                let writes = self.recent(block, instant);
                format!("\n  block {block} has {found:?} and may have {may:?} of {writes}")
            })
            .collect();
        let covered = self.covered(instant, lost);
        Err((first, format!("a flush at {covered} is not honoured:{}", wrong.concat())))
    }
}

/// The data of `block` with `content`.
pub fn data(block: usize, content: u32) -> Vec<u8> {
    if content == 0 {
        return vec![0; BLOCK];
    }
    word(block, content).to_le_bytes().repeat(BLOCK / 8)
}

fn word(block: usize, content: u32) -> u64 {
    (block as u64 + 1) << 32 | u64::from(content)
}

/// The content whose data `bytes` of `block` are.
pub fn number(block: usize, bytes: &[u8]) -> Option<u32> {
    let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let content = first as u32;
    let is_own = first == 0 || first == word(block, content);
    let is_whole = bytes.chunks(8).all(|word| word == first.to_le_bytes());
    (is_own && is_whole).then_some(content)
}

/// Whether `bytes` are, or may be, a part of the data of one of `blocks`.
pub fn is_of(blocks: &[usize], bytes: &[u8]) -> bool {
    block_of(bytes).is_some_and(|block| blocks.contains(&block))
}

/// The block of which `sector` is, or may be, a part of the data.
pub fn block_of(sector: &[u8]) -> Option<usize> {
    let high = u32::from_le_bytes(sector[4..8].try_into().unwrap()) as usize;
    let block = high.checked_sub(1)?;
    number(block, sector).map(|_| block)
}
