use super::*;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

#[test]
fn a_watched_descriptor_gives_its_event_with_owner_and_token() {
    let mut reactor = Reactor::new(8).unwrap();
    let first = reactor.register();
    let second = reactor.register();
    assert_ne!(first, second);
    let (mut writer, reader) = UnixStream::pair().unwrap();
    reactor.watch(second, 77, reader.as_fd());
    let start = Instant::now();
    reactor.wait(Some(Duration::from_millis(20))).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(15));
    let mut events = Vec::new();
    reactor.collect(&mut events).unwrap();
    assert!(events.is_empty());
    writer.write_all(b"x").unwrap();
    reactor.wait(None).unwrap();
    reactor.collect(&mut events).unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].owner, events[0].token), (second, 77));
}

#[test]
fn a_dropped_reactor_ends_its_operations_in_flight() {
    let (reader, writer) = UnixStream::pair().unwrap();
    let mut memory = [0; 8];
    let mut reactor = Reactor::new(8).unwrap();
    let owner = reactor.register();
    let pending = reactor.pending();
    reactor.watch_always(owner, 3, reader.as_fd());
    assert_eq!(pending.count(), 0);
    let read =
        opcode::Read::new(types::Fd(reader.as_raw_fd()), memory.as_mut_ptr(), memory.len() as u32);
    // SAFETY: the memory outlives the reactor, which ends the read.
    unsafe { reactor.push(owner, 3, read.build()) };
    reactor.submit().unwrap();
    assert_eq!(pending.count(), 1);
    // Without a writer the read ends only because it is cancelled.
    assert!(!reactor.drain(Duration::ZERO));
    drop(reactor);
    assert_eq!(pending.count(), 0);
    (&writer).write_all(b"unread").unwrap();
    assert_eq!(memory, [0; 8]);
}

#[test]
fn groups_count_separately() {
    let (reader, _writer) = UnixStream::pair().unwrap();
    let mut memory = [0; 8];
    let mut reactor = Reactor::new(8).unwrap();
    let first_group = reactor.begin_group();
    let (first, first_pending) = (reactor.register(), reactor.pending());
    let second_group = reactor.begin_group();
    let (second, second_pending) = (reactor.register(), reactor.pending());
    let read = opcode::Read::new(types::Fd(reader.as_raw_fd()), memory.as_mut_ptr(), 8);
    // SAFETY: the memory outlives the reactor, which ends the read.
    unsafe { reactor.push(first, 3, read.build()) };
    // SAFETY: a no-op uses no memory.
    unsafe { reactor.push(second, 4, opcode::Nop::new().build()) };
    let mut events = Vec::new();
    while second_pending.count() > 0 {
        reactor.wait(None).unwrap();
        reactor.collect(&mut events).unwrap();
    }
    assert_eq!((first_pending.count(), events.len()), (1, 1));
    assert_eq!((events[0].owner, events[0].group), (second, second_group));
    // An owner that registers later can belong to an earlier group.
    reactor.enter(first_group, &first_pending);
    let late = reactor.register();
    // SAFETY: a no-op uses no memory.
    unsafe { reactor.push(late, 5, opcode::Nop::new().build()) };
    assert_eq!((first_pending.count(), second_pending.count()), (2, 0));
    assert!(reactor.drain(Duration::from_secs(5)));
    assert_eq!(first_pending.count(), 0);
}

#[test]
fn marks_of_owners_are_reused() {
    let (reader, mut writer) = UnixStream::pair().unwrap();
    writer.write_all(b"readable").unwrap();
    let mut reactor = Reactor::new(64).unwrap();
    let mut events = Vec::new();
    for round in 0..100_000 {
        let owner = reactor.register();
        if round % 64 == 0 {
            reactor.watch_always(owner, 1, reader.as_fd());
            // SAFETY: a no-op uses no memory.
            unsafe { reactor.push(owner, 2, opcode::Nop::new().build()) };
        }
        if round % 128 == 0 {
            reactor.submit().unwrap();
        }
        reactor.retire(owner);
        reactor.retire(owner);
        if round % 1024 == 0 {
            reactor.wait(Some(Duration::from_millis(1))).unwrap();
            events.clear();
            reactor.collect(&mut events).unwrap();
            assert!(events.is_empty(), "events of retired owners are dropped");
        }
    }
    assert_eq!(reactor.owners(), 0);
    assert!(reactor.owners.len() < 200, "{} marks", reactor.owners.len());
}

#[test]
fn more_entries_than_the_ring_holds_all_complete() {
    let mut reactor = Reactor::new(4).unwrap();
    let owner = reactor.register();
    for token in 0..1000 {
        // SAFETY: a no-op uses no memory.
        unsafe { reactor.push(owner, token, opcode::Nop::new().build()) };
    }
    let mut events = Vec::new();
    while events.len() < 1000 {
        reactor.wait(Some(Duration::from_secs(5))).unwrap();
        reactor.collect(&mut events).unwrap();
    }
    let mut tokens: Vec<u64> = events.iter().map(|event| event.token).collect();
    tokens.sort_unstable();
    assert!(tokens.into_iter().eq(0..1000));
    assert!(!reactor.has_unsubmitted());
}
