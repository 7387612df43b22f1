//! The scripts that nodes run. Each first compares the shard's volume and epoch, so that a daemon
//! that was replaced by another one can neither read nor write.
//!
//! An epoch is a number and, behind a dot, what distinguishes two openings with the same number,
//! should a node forget that it has given it. A shard's state is a hash: `volume`, `epoch`, `count`
//! (of its writes), and for other shards `wN`, the count that shard N had reached when a write of
//! this shard began. An opening compares these counts, and so finds a shard whose node has
//! forgotten writes.

/// A script that begins with the comparison of the shard's state, `KEYS[1]`, with a volume and an
/// epoch, the first two of `ARGV`. If they differ, it returns those of the state.
macro_rules! guarded {
    ($script:literal) => {
        concat!(
            "\
local state = redis.call('HMGET', KEYS[1], 'volume', 'epoch')
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then
  return {tostring(state[1]), tostring(state[2])}
end
",
            $script
        )
    };
}

/// `KEYS`: the state, the blocks. `ARGV`: volume, epoch, the shard that is witnessed and its count
/// (empty for none), and the blocks' values. A value that is older than the stored one is not
/// written. Returns the shard's count, or -1 if a value was not written.
///
/// Something is always written, so that a `WAIT` on the same connection covers all earlier writes
/// of the node, also those of a connection that was lost.
pub(crate) const WRITE: &str = guarded!(
    "\
local is_whole = true
for index = 2, #KEYS do
  local value = ARGV[index + 3]
  local stored = redis.call('GETRANGE', KEYS[index], 16, 31)
  local is_newer = false
  if #stored == 16 then
    local epoch, sequence = struct.unpack('<I8I8', stored)
    local new_epoch, new_sequence = struct.unpack('<I8I8', value, 17)
    is_newer = epoch > new_epoch or (epoch == new_epoch and sequence > new_sequence)
  end
  if is_newer then is_whole = false else redis.call('SET', KEYS[index], value) end
end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'w' .. ARGV[3], ARGV[4]) end
local count = redis.call('HINCRBY', KEYS[1], 'count', 1)
return is_whole and count or -1
"
);

/// `KEYS`: the state, the block. `ARGV`: volume, epoch, the version that the block is expected to
/// have (16 bytes; empty if it has none), the value. Returns the shard's count, or -1 if the block
/// has another version.
pub(crate) const REPLACE: &str = guarded!(
    "\
local stored = redis.call('GETRANGE', KEYS[2], 16, 31)
if stored ~= ARGV[3] and stored ~= string.sub(ARGV[4], 17, 32) then return -1 end
redis.call('SET', KEYS[2], ARGV[4])
return redis.call('HINCRBY', KEYS[1], 'count', 1)
"
);

/// `KEYS`: the state, the blocks. `ARGV`: volume, epoch. Returns 1, then the blocks' values.
pub(crate) const READ: &str = guarded!(
    "\
local values = redis.call('MGET', unpack(KEYS, 2))
table.insert(values, 1, 1)
return values
"
);

/// `KEYS`: the state. `ARGV`: volume, epoch. Returns 1.
pub(crate) const EXAMINE: &str = guarded!("return 1");

/// `KEYS`: the volume. `ARGV`: the identity of a new volume (empty if none is made), the wanted
/// capacity, the block size, the number of shards, the owner's name. Returns whether a new volume
/// is incomplete, and its fields. The epoch is a new one.
pub(crate) const OPEN: &str = "\
if redis.call('EXISTS', KEYS[1]) == 0 then
  if ARGV[1] == '' then return 0 end
  redis.call('HSET', KEYS[1], 'format', 1, 'volume', ARGV[1], 'capacity', ARGV[2],
    'block', ARGV[3], 'shards', ARGV[4], 'epoch', 0, 'made', 0)
end
local found = redis.call('HMGET', KEYS[1], 'format', 'block', 'shards', 'volume', 'capacity', 'made')
if found[1] ~= '1' or found[2] ~= ARGV[3] or found[3] ~= ARGV[4] then return {1} end
if tonumber(found[5]) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'capacity', ARGV[2])
  found[5] = ARGV[2]
end
redis.call('HSET', KEYS[1], 'owner', ARGV[5])
return {2, found[4], found[5], found[6], redis.call('HINCRBY', KEYS[1], 'epoch', 1)}
";

/// `KEYS`: the volume. `ARGV`: its identity. All its shards exist.
pub(crate) const MADE: &str = "\
if redis.call('HGET', KEYS[1], 'volume') ~= ARGV[1] then return 0 end
return redis.call('HSET', KEYS[1], 'made', 1) + 1
";

/// `KEYS`: the state. `ARGV`: volume, epoch, 1 if the shard may be made. Returns all fields of the
/// state, or 0 if there is none, or 1 if another opening has this epoch or a newer one.
pub(crate) const CLAIM: &str = "\
local state = redis.call('HMGET', KEYS[1], 'volume', 'epoch')
if not state[1] then
  if ARGV[3] ~= '1' then return 0 end
elseif state[1] ~= ARGV[1] then
  return {tostring(state[1])}
elseif state[2] ~= ARGV[2] then
  local number = function(epoch) return tonumber(string.match(epoch, '^%d+')) or 0 end
  if number(state[2]) >= number(ARGV[2]) then return 1 end
end
redis.call('HSET', KEYS[1], 'volume', ARGV[1], 'epoch', ARGV[2])
return redis.call('HGETALL', KEYS[1])
";
