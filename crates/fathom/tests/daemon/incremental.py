# An incremental backup with libnbd, as backup programs do it: the extents of two contexts of one
# connection say what is copied, and what becomes zeroes. Its `words` are the URI, the snapshot since
# which changes are copied, and the image with the content of that snapshot.
uri, name, path = words
bitmap = 'qemu:dirty-bitmap:' + name
h.add_meta_context('base:allocation')
h.add_meta_context(bitmap)
h.connect_uri(uri)
assert h.can_meta_context(bitmap) and h.can_meta_context('base:allocation')
def extents(context):
    at, found = 0, []
    while at < h.get_size():
        pairs = []
        def take(name, offset, entries, error):
            if name == context:
                pairs.extend(zip(entries[::2], entries[1::2]))
        h.block_status(h.get_size() - at, at, take)
        for length, flags in pairs:
            found.append((at, length, flags))
            at += length
    return found
holes = [(at, at + length) for at, length, flags in extents('base:allocation') if flags & 2]
copied = 0
with open(path, 'r+b') as image:
    image.truncate(h.get_size())
    for at, length, flags in extents(bitmap):
        end = at + length
        while flags & 1 and at < end:
            count = min(end - at, 1 << 20)
            image.seek(at)
            if any(first <= at and at + count <= last for first, last in holes):
                image.write(bytes(count))
            else:
                image.write(h.pread(count, at))
                copied += count
            at += count
print(copied)
