//! A volume in a cluster: how it is made and opened, and what its requests do there.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_block::ErrorKind;
use fathom_failure::Failure;
use fathom_persistence::Identity;
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::Value;

use crate::client::{Call, CallError, Client, ClusterOptions, text};
use crate::format::{BLOCK, BlockVersion, HEADER, ValueDefect, decode, encode};
use crate::layout::{GROUP, SHARDS, block_key, blocks, shard, state_key, volume_key};
use crate::nodes::check_nodes;
use crate::scripts;
use crate::versions::{Versions, Witness, Witnesses};

/// The pause before a part of a request is tried again, at first and at most.
const PAUSE: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// How long a read of a block whose content is wrong is repeated: another node may have the right
/// one soon.
const WRONG_TIME_MAX: Duration = Duration::from_secs(5);
/// How long an error is reported if no request follows.
const REPORT_TIME: Duration = Duration::from_secs(60);
/// Shards that are claimed or examined at the same time.
const CLAIMS: usize = 32;
/// After this time without a change, the next one finds out first whether all shards are still
/// there.
const REST_TIME: Duration = Duration::from_secs(5);
/// How long it waits for shards that do not answer.
const EXAMINATION_TIME_MAX: Duration = Duration::from_secs(2);
/// The largest volume, in bytes: the versions of its blocks are in memory.
pub const CAPACITY_MAX: u64 = 256 << 30;

/// Which volume is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeOptions {
    /// The volume's name; see [`is_name`](crate::is_name).
    pub name: String,
    /// The least size, in bytes. A larger volume keeps its size.
    pub capacity: u64,
    /// Whether a volume is made if there is none.
    pub may_make: bool,
    /// Who opens it, for operators who look at the cluster.
    pub owner: String,
}

/// What is wrong with a volume, as far as requests have found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// Another opening has the volume, or shards of it have gone.
    pub(crate) lost: Option<String>,
    /// Requests got no answer a short time ago.
    pub(crate) unreachable: Option<(Instant, String)>,
    /// What was read is not what was written.
    pub(crate) wrong: Option<String>,
}

/// A volume that this process has opened.
pub(crate) struct Volume {
    client: Client,
    name: String,
    identity: Identity,
    /// The identity and the epoch, as scripts get them.
    identity_text: String,
    epoch_text: String,
    epoch: u64,
    pub(crate) capacity: AtomicU64,
    timeout: Duration,
    sequence: AtomicU64,
    versions: Versions,
    witnesses: Witnesses,
    trouble: Mutex<Trouble>,
    /// How often a part of a request was repeated.
    pub(crate) repeats: AtomicU64,
    /// When a part of a change last began or ended.
    used: Mutex<Instant>,
}

/// What a part of a request does with the blocks of one group.
pub(crate) enum GroupOperation {
    /// Reads the range.
    Read(Range<u64>),
    /// Writes values of whole blocks.
    Write(Vec<(u64, BlockVersion, Vec<u8>)>),
    /// Writes bytes within one block.
    Merge(u64, Vec<u8>),
}

/// Why a part is not done yet.
enum Setback {
    Later(String),
    Wrong(String),
    Final(ErrorKind),
}

impl Volume {
    /// Opens a volume: all earlier openings can neither read nor write it any more.
    pub(crate) async fn open(
        options: &ClusterOptions,
        volume: &VolumeOptions,
    ) -> Result<Self, Failure> {
        let client = Client::connect(options).await?;
        check_nodes(&client, options.copies).await?;
        let name = &volume.name;
        let (identity, capacity, is_made, epoch) = open_volume(&client, volume).await?;
        let opened = Self {
            client,
            name: name.clone(),
            identity_text: identity.to_string(),
            identity,
            epoch_text: format!("{epoch}.{}", draw()?),
            epoch,
            capacity: AtomicU64::new(capacity),
            timeout: options.timeout,
            sequence: AtomicU64::new(0),
            versions: Versions::default(),
            witnesses: Witnesses::default(),
            trouble: Mutex::default(),
            repeats: AtomicU64::new(0),
            used: Mutex::new(Instant::now()),
        };
        opened.claim(is_made).await?;
        if !is_made {
            let (keys, identity) = ([volume_key(name)], opened.identity_text.as_bytes());
            let call = Call { script: scripts::MADE, keys: &keys, arguments: &[identity] };
            let answer = opened.client.write(0, &call).await.map_err(of_call)?;
            if answer == Value::Int(0) {
                let failure = Failure::new("another daemon makes this volume");
                return Err(failure.advise("choose another name"));
            }
        }
        Ok(opened)
    }

    /// Gives all shards the new epoch. Finds shards that are gone, or have forgotten writes.
    async fn claim(&self, is_made: bool) -> Result<(), Failure> {
        let may_make: &[u8] = if is_made { b"0" } else { b"1" };
        let claim = async |shard: u64| {
            let keys = [state_key(&self.name, shard)];
            let arguments = [self.identity_text.as_bytes(), self.epoch_text.as_bytes(), may_make];
            let call = Call { script: scripts::CLAIM, keys: &keys, arguments: &arguments };
            self.client.write(shard, &call).await.map_err(of_call)
        };
        // Those of all shards, in order.
        let mut states = Vec::with_capacity(SHARDS as usize);
        for begin in (0..SHARDS).step_by(CLAIMS) {
            let shards = begin..(begin + CLAIMS as u64).min(SHARDS);
            for answer in join_all(shards.map(&claim)).await {
                states.push(state(&self.name, answer?)?);
            }
        }
        for (shard, state) in states.iter().enumerate() {
            for (witnessed, count) in &state.witnessed {
                let known = states.get(*witnessed as usize).map_or(0, |other| other.count);
                if known < *count {
                    return Err(Failure::new(format!(
                        "shard {witnessed} of the volume {:?} has forgotten writes that were acknowledged: shard \
                         {shard} knows of {count}, and it of {known}",
                        self.name
                    ))
                    .advise("restore the node from its copy or its append-only file"));
                }
            }
        }
        Ok(())
    }

    fn trouble<T>(&self, access: impl FnOnce(&mut Trouble) -> T) -> T {
        access(&mut self.trouble.lock())
    }

    /// Whether another opening has the volume.
    fn is_lost(&self) -> bool {
        self.trouble(|trouble| trouble.lost.is_some())
    }

    /// What is wrong with the volume.
    pub(crate) fn troubles(&self) -> Trouble {
        let mut trouble = self.trouble(|trouble| trouble.clone());
        // Without requests, nobody finds out that the nodes answer again.
        trouble.unreachable.take_if(|(since, _)| since.elapsed() > REPORT_TIME);
        trouble
    }

    /// The value of a block that is written now.
    pub(crate) fn value(&self, block: u64, bytes: &[u8]) -> (u64, BlockVersion, Vec<u8>) {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let version = BlockVersion { epoch: self.epoch, sequence };
        (block, version, encode(self.identity, block, version, bytes))
    }

    /// Carries out a part of a request. Returns the bytes that a read has.
    pub(crate) async fn carry_out(&self, mut work: GroupOperation) -> Result<Vec<u8>, ErrorKind> {
        let begin = Instant::now();
        let (mut pause, mut was_wrong, mut was_late) = (PAUSE, false, false);
        let is_change = !matches!(work, GroupOperation::Read(_));
        let mut is_first = is_change && self.use_now() > REST_TIME;
        loop {
            if self.is_lost() {
                return Err(ErrorKind::Io);
            }
            let attempt = async {
                if is_first {
                    self.examine().await?;
                    is_first = false;
                }
                match &mut work {
                    GroupOperation::Read(range) => self.read(range).await,
                    GroupOperation::Write(values) => self.write(values).await.map(|()| Vec::new()),
                    GroupOperation::Merge(offset, bytes) => {
                        self.merge(*offset, bytes).await.map(|()| Vec::new())
                    }
                }
            };
            let left = self.timeout.saturating_sub(begin.elapsed());
            let found = tokio::time::timeout(left, attempt).await;
            let failure = match found {
                Ok(Ok(bytes)) => {
                    if is_change {
                        self.use_now();
                    }
                    if was_late || was_wrong {
                        self.trouble(|trouble| {
                            // This part has found the trouble, and its end. Others may still have
                            // theirs.
                            trouble.unreachable.take_if(|_| was_late);
                            trouble.wrong.take_if(|_| was_wrong);
                        });
                    }
                    return Ok(bytes);
                }
                Ok(Err(failure)) => failure,
                Err(_) => Setback::Later("a node does not answer".into()),
            };
            let limit = match failure {
                Setback::Final(kind) => return Err(kind),
                Setback::Later(text) => {
                    was_late = true;
                    self.trouble(|trouble| trouble.unreachable = Some((Instant::now(), text)));
                    self.timeout
                }
                Setback::Wrong(text) => {
                    was_wrong = true;
                    self.trouble(|trouble| trouble.wrong = Some(text));
                    WRONG_TIME_MAX.min(self.timeout)
                }
            };
            if begin.elapsed() + pause >= limit {
                return Err(ErrorKind::Io);
            }
            self.repeats.fetch_add(1, Ordering::Relaxed);
            self.client.renew().await;
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// A part of a change begins or ends. Returns for how long none had.
    fn use_now(&self) -> Duration {
        let mut used = self.used.lock();
        std::mem::replace(&mut *used, Instant::now()).elapsed()
    }

    /// Finds out whether all shards have their states. A node that was emptied while nobody used
    /// the volume would be found by the changes of its own shards only, too late for whoever relies
    /// on the whole volume. So the first change after a rest calls this. Shards that do not answer
    /// are no obstacle.
    async fn examine(&self) -> Result<(), Setback> {
        let arguments = [self.identity_text.as_bytes(), self.epoch_text.as_bytes()];
        let examine = async |shard: u64| {
            let keys = [state_key(&self.name, shard)];
            let call = Call { script: scripts::EXAMINE, keys: &keys, arguments: &arguments };
            match self.client.read(shard, &call).await {
                Ok(Value::Int(1)) | Err(_) => Ok(()),
                Ok(other) => Err(self.refused(shard, &other)),
            }
        };
        let all = async {
            for begin in (0..SHARDS).step_by(CLAIMS) {
                let shards = begin..(begin + CLAIMS as u64).min(SHARDS);
                join_all(shards.map(&examine)).await.into_iter().collect::<Result<(), _>>()?;
            }
            Ok(())
        };
        tokio::time::timeout(EXAMINATION_TIME_MAX, all).await.unwrap_or(Ok(()))
    }

    fn keys(&self, blocks: impl Iterator<Item = u64>, group: u64) -> Vec<String> {
        let state = std::iter::once(state_key(&self.name, shard(group)));
        state.chain(blocks.map(|block| block_key(&self.name, block))).collect()
    }

    /// The bytes of a range within a group.
    async fn read(&self, range: &Range<u64>) -> Result<Vec<u8>, Setback> {
        let all = self.read_blocks(blocks(range)).await?;
        let skipped = (range.start % BLOCK) as usize;
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize + skipped);
        for (_, content) in all {
            let end = bytes.len() + BLOCK as usize;
            bytes.extend_from_slice(&content);
            bytes.resize(end, 0);
        }
        bytes.drain(..skipped);
        bytes.truncate((range.end - range.start) as usize);
        Ok(bytes)
    }

    /// The versions of blocks of a group, and their bytes before the zeroes at their ends.
    async fn read_blocks(
        &self,
        blocks: Range<u64>,
    ) -> Result<Vec<(BlockVersion, Vec<u8>)>, Setback> {
        let group = blocks.start * BLOCK / GROUP;
        let known: Vec<BlockVersion> =
            blocks.clone().map(|block| self.versions.get(block)).collect();
        let keys = self.keys(blocks.clone(), group);
        let arguments = [self.identity_text.as_bytes(), self.epoch_text.as_bytes()];
        let call = Call { script: scripts::READ, keys: &keys, arguments: &arguments };
        let answer = self.client.read(group, &call).await;
        let values = match answer.map_err(|error| self.failure(error))? {
            Value::Array(values) if values.first() == Some(&Value::Int(1)) => values,
            other => return Err(self.refused(group, &other)),
        };
        if values.len() != known.len() + 1 {
            return Err(self.wrong(blocks.start, "the number of values is wrong"));
        }
        let newest =
            BlockVersion { epoch: self.epoch, sequence: self.sequence.load(Ordering::Relaxed) };
        let mut found = Vec::with_capacity(known.len());
        for ((block, value), known) in blocks.zip(&values[1..]).zip(known) {
            let (version, bytes) = match value {
                Value::Nil => (BlockVersion::default(), Vec::new()),
                Value::BulkString(value) => {
                    let decoded = decode(self.identity, block, value);
                    let (version, bytes) =
                        decoded.map_err(|wrong: ValueDefect| self.wrong(block, wrong))?;
                    if version > newest {
                        return Err(self.wrong(block, "it is newer than all writes"));
                    }
                    (version, bytes.to_vec())
                }
                _ => return Err(self.wrong(block, "it is no text")),
            };
            if version < known {
                return Err(self.wrong(block, "it is older than the last write"));
            }
            self.versions.learn(block, version);
            found.push((version, bytes));
        }
        Ok(found)
    }

    /// Writes values of blocks of a group.
    ///
    /// A block may have a newer version already: of another write that is in flight, perhaps of a
    /// part of the block only. This write is then repeated as the newest one. What a node gets
    /// late, from a connection that was given up, is not repeated.
    async fn write(&self, values: &mut [(u64, BlockVersion, Vec<u8>)]) -> Result<(), Setback> {
        while !self.write_once(values).await? {
            for value in &mut *values {
                *value = self.value(value.0, value.2.get(HEADER..).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Returns whether all values are written; if not, some have newer versions.
    async fn write_once(&self, values: &[(u64, BlockVersion, Vec<u8>)]) -> Result<bool, Setback> {
        let Some((first, ..)) = values.first() else { return Ok(true) };
        let group = first * BLOCK / GROUP;
        let shard = shard(group);
        let keys = self.keys(values.iter().map(|(block, ..)| *block), group);
        let witness = self.witnesses.take(shard);
        let (other, count) = texts(witness);
        let mut arguments: Vec<&[u8]> = vec![
            self.identity_text.as_bytes(),
            self.epoch_text.as_bytes(),
            other.as_bytes(),
            count.as_bytes(),
        ];
        arguments.extend(values.iter().map(|(_, _, value)| &value[..]));
        let call = Call { script: scripts::WRITE, keys: &keys, arguments: &arguments };
        let answer = self.client.write(group, &call).await;
        if let (Err(_), Some((other, count))) = (&answer, witness) {
            self.witnesses.note(other, count);
        }
        match answer.map_err(|error| self.failure(error))? {
            Value::Int(-1) => Ok(false),
            Value::Int(count) if count > 0 => {
                self.witnesses.note(shard, count as u64);
                for (block, version, _) in values {
                    self.versions.learn(*block, *version);
                }
                Ok(true)
            }
            other => Err(self.refused(group, &other)),
        }
    }

    /// Writes bytes within a block. If another write has changed the block meanwhile, begins again.
    async fn merge(&self, offset: u64, bytes: &[u8]) -> Result<(), Setback> {
        let block = offset / BLOCK;
        let group = offset / GROUP;
        loop {
            let found = self.read_blocks(block..block + 1).await?;
            let Some((stored, mut content)) = found.into_iter().next() else { return Ok(()) };
            content.resize(BLOCK as usize, 0);
            let at = (offset % BLOCK) as usize;
            content[at..at + bytes.len()].copy_from_slice(bytes);
            let (_, version, value) = self.value(block, &content);
            let expected = if stored == BlockVersion::default() {
                Vec::new()
            } else {
                [stored.epoch.to_le_bytes(), stored.sequence.to_le_bytes()].concat()
            };
            let keys = self.keys(std::iter::once(block), group);
            let arguments: [&[u8]; 4] =
                [self.identity_text.as_bytes(), self.epoch_text.as_bytes(), &expected, &value];
            let call = Call { script: scripts::REPLACE, keys: &keys, arguments: &arguments };
            let answer = self.client.write(group, &call).await;
            match answer.map_err(|error| self.failure(error))? {
                Value::Int(-1) => {}
                Value::Int(count) if count > 0 => {
                    self.witnesses.note(shard(group), count as u64);
                    self.versions.learn(block, version);
                    return Ok(());
                }
                other => return Err(self.refused(group, &other)),
            }
        }
    }

    fn failure(&self, error: CallError) -> Setback {
        match error {
            CallError::Later(text) => Setback::Later(text),
            CallError::Full(text) => {
                self.trouble(|trouble| trouble.unreachable = Some((Instant::now(), text)));
                Setback::Final(ErrorKind::NoSpace)
            }
            CallError::Never(text) => {
                self.trouble(|trouble| trouble.unreachable = Some((Instant::now(), text)));
                Setback::Final(ErrorKind::Io)
            }
        }
    }

    fn wrong(&self, block: u64, why: impl fmt::Display) -> Setback {
        Setback::Wrong(format!("block {block} of the volume {:?}: {why}", self.name))
    }

    /// The shard has another volume or epoch than this opening.
    fn refused(&self, group: u64, answer: &Value) -> Setback {
        let shard = shard(group);
        let Value::Array(state) = answer else {
            return Setback::Wrong(format!(
                "shard {shard} of the volume {:?} has no state",
                self.name
            ));
        };
        let field = |index: usize| state.get(index).and_then(text).unwrap_or_default();
        let epoch = field(1).split('.').next().and_then(|text| text.parse().ok()).unwrap_or(0);
        if field(0) == self.identity_text && epoch >= self.epoch {
            let text = format!(
                "another daemon has opened the volume {:?} since (epoch {epoch})",
                self.name
            );
            self.trouble(|trouble| trouble.lost = Some(text));
            return Setback::Final(ErrorKind::Io);
        }
        // A node without the newest state may answer for a while, before it is replaced.
        Setback::Wrong(format!(
            "shard {shard} of the volume {:?} has lost its state (epoch {epoch} of {})",
            self.name, self.epoch
        ))
    }
}

fn texts(witness: Option<Witness>) -> (String, String) {
    witness.map_or_else(Default::default, |(shard, count)| (shard.to_string(), count.to_string()))
}

fn of_call(error: CallError) -> Failure {
    let (message, remedy) = match error {
        CallError::Later(text) => (format!("the cluster does not answer ({text})"), "repair it"),
        CallError::Full(text) => (format!("a node is full ({text})"), "give it more `maxmemory`"),
        CallError::Never(text) => {
            let remedy = "give the user the rights that docs/valkey.md lists";
            (format!("a node refuses ({text})"), remedy)
        }
    };
    Failure::new(message).advise(remedy)
}

/// The state of a shard.
#[derive(Debug, Default, PartialEq, Eq)]
struct ShardState {
    count: u64,
    witnessed: Vec<Witness>,
}

/// The state in the answer to a claim.
fn state(name: &str, answer: Value) -> Result<ShardState, Failure> {
    let fields: Vec<Value> = match answer {
        Value::Int(0) => {
            let message =
                format!("a part of the volume {name:?} is gone: a node has lost its data");
            return Err(Failure::new(message).advise(
                "restore it from its copy or its append-only file, or give up the volume with \
                 `fathom offload forget`",
            ));
        }
        Value::Int(_) => {
            let message = format!("another daemon opens the volume {name:?} at the same time");
            return Err(Failure::new(message).advise("use one daemon for each volume"));
        }
        Value::Array(fields) if fields.len() >= 4 => fields,
        _ => {
            let message = format!("parts of an earlier volume {name:?} are left");
            let remedy = "choose another name, or remove them with `fathom offload forget`";
            return Err(Failure::new(message).advise(remedy));
        }
    };
    let mut state = ShardState::default();
    for pair in fields.chunks(2) {
        let [name, value] = pair else { break };
        let (Some(name), Some(value)) = (text(name), text(value)) else { continue };
        let Ok(value) = value.parse::<u64>() else { continue };
        if name == "count" {
            state.count = value;
        } else if let Some(Ok(shard)) = name.strip_prefix('w').map(str::parse) {
            state.witnessed.push((shard, value));
        }
    }
    Ok(state)
}

/// Makes or finds the volume. Returns its identity, its capacity, whether all of its shards have
/// been made, and the new epoch.
async fn open_volume(
    client: &Client,
    volume: &VolumeOptions,
) -> Result<(Identity, u64, bool, u64), Failure> {
    let new = if volume.may_make { draw()?.to_string() } else { String::new() };
    let keys = [volume_key(&volume.name)];
    let numbers = [volume.capacity, BLOCK, SHARDS].map(|number| number.to_string());
    let arguments: [&[u8]; 5] = [
        new.as_bytes(),
        numbers[0].as_bytes(),
        numbers[1].as_bytes(),
        numbers[2].as_bytes(),
        volume.owner.as_bytes(),
    ];
    let call = Call { script: scripts::OPEN, keys: &keys, arguments: &arguments };
    let name = &volume.name;
    let unknown = || {
        Failure::new(format!("the volume {name:?} is not one of this version of Fathom"))
            .advise("choose another name, or use the later version")
    };
    let fields = match client.write(0, &call).await.map_err(of_call)? {
        Value::Int(0) => {
            let message =
                format!("the volume {name:?} with changes of the disk is not in this cluster");
            return Err(Failure::new(message).advise("name its cluster"));
        }
        Value::Array(fields) if fields.len() == 5 && fields[0] == Value::Int(2) => fields,
        _ => return Err(unknown()),
    };
    let number = |index: usize| fields.get(index).and_then(text)?.parse::<u64>().ok();
    let identity = fields.get(1).and_then(text).and_then(|text| Identity::parse(&text));
    let (Some(identity), Some(capacity), Some(made), Some(epoch)) =
        (identity, number(2), number(3), number(4))
    else {
        return Err(unknown());
    };
    // Scripts compute with doubles.
    if epoch == 0 || epoch >= 1 << 53 || capacity > CAPACITY_MAX {
        return Err(unknown());
    }
    Ok((identity, capacity, made == 1, epoch))
}

fn draw() -> Result<Identity, Failure> {
    Identity::draw().map_err(|error| Failure::from(error).about("no random numbers"))
}

const _: () = assert!(HEADER == 56, "the scripts compare versions at the offset 16");
