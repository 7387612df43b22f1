//! Requests that a layer holds when a ring stops, when its memory moves, and when its VMM goes.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::client::{Client, DATA, MEMORY, READ, WRITE, region};
use crate::holding::Holding;
use crate::{Served, serve_with};

/// A stop must be over long before this: what waits for space may wait for days.
const SOON: Duration = Duration::from_millis(4500);
/// Less than the time for which a stop waits for requests that cannot be given back.
const IMMEDIATELY: Duration = Duration::from_millis(300);

fn serve_held() -> (Served, Arc<AtomicBool>) {
    let layer = Holding::default();
    let holds = Arc::clone(&layer.holds);
    holds.store(true, Ordering::Relaxed);
    (serve_with(vec![Arc::new(layer)], false), holds)
}

/// Offers a request of 512 bytes whose head, memory and sector follow from `number`.
fn offer(client: &mut Client, number: u16, kind: u32) {
    let at = DATA + 0x2000 * u64::from(number);
    client.put_header(at, kind, u64::from(number));
    client.put(at + 0x100, &[0xee]);
    client.put(at + 0x1000, &[number as u8 + 1; 512]);
    let pieces = [(at, 16, false), (at + 0x1000, 512, kind == READ), (at + 0x100, 1, true)];
    client.put_chain(0, 3 * number, &pieces);
    client.offer(0, 3 * number);
    client.kick(0);
}

fn status(client: &Client, number: u16) -> u8 {
    client.get(DATA + 0x2000 * u64::from(number) + 0x100, 1)[0]
}

/// Stops the ring. Returns the index at which it continues, and how long that took.
fn stop(client: &Client) -> (u16, Duration) {
    let begun = Instant::now();
    let base = client.frontend.get_vring_base(0).unwrap();
    (base as u16, begun.elapsed())
}

#[test]
fn a_ring_that_stops_gives_the_last_requests_back_untouched() {
    let (served, holds) = serve_held();
    let mut client = Client::start(&served.socket, 1, 0);
    offer(&mut client, 0, READ);
    assert_eq!(client.wait(0).0, 0);
    offer(&mut client, 1, WRITE);
    offer(&mut client, 2, WRITE);
    assert_eq!(client.wait_for(0, IMMEDIATELY), None, "the writes wait");
    let (base, time) = stop(&client);
    assert!(time < SOON, "{time:?}");
    assert_eq!(base, 1, "the ring continues with the writes");
    assert_eq!((status(&client, 1), status(&client, 2), client.used_index(0)), (0xee, 0xee, 1));
    // The same device continues.
    client.start_queue(0, base);
    client.kick(0);
    assert_eq!(client.wait_for(0, IMMEDIATELY), None, "the writes wait again");
    holds.store(false, Ordering::Relaxed);
    let mut heads = [client.wait(0).0, client.wait(0).0];
    heads.sort_unstable();
    assert_eq!((heads, status(&client, 1), status(&client, 2)), ([3, 6], 0, 0));
    // A device that was reset does not: the writes never land.
    holds.store(true, Ordering::Relaxed);
    offer(&mut client, 3, WRITE);
    assert_eq!(client.wait_for(0, IMMEDIATELY), None);
    stop(&client);
    client.clear(0);
    client.start_queue(0, 0);
    holds.store(false, Ordering::Relaxed);
    let mut data = [9; 512];
    assert_eq!(client.request(0, WRITE, 3, &mut data), 0);
    std::thread::sleep(IMMEDIATELY);
    assert_eq!(client.request(0, READ, 3, &mut data), 0);
    assert_eq!(data, [9; 512]);
}

#[test]
fn what_is_held_between_completed_requests_stays_in_the_in_flight_memory() {
    let (served, holds) = serve_held();
    let mut client = Client::connect(&served.socket, 1, 0);
    let (inflight, file) = client.new_inflight(1);
    client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    client.start_queue(0, 0);
    offer(&mut client, 0, WRITE);
    offer(&mut client, 1, READ);
    assert_eq!(client.wait(0).0, 3, "the read does not wait");
    offer(&mut client, 2, WRITE);
    assert_eq!(client.wait_for(0, IMMEDIATELY), None);
    let (base, time) = stop(&client);
    assert!(time < SOON, "{time:?}");
    assert_eq!((base, client.used_index(0)), (2, 1), "the last write is given back");
    assert_eq!((status(&client, 0), status(&client, 2)), (0xee, 0xee));
    client.frontend.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();
    client.start_queue(0, base);
    client.kick(0);
    holds.store(false, Ordering::Relaxed);
    let mut heads = [client.wait(0).0, client.wait(0).0];
    heads.sort_unstable();
    assert_eq!((heads, status(&client, 0), status(&client, 2)), ([0, 6], 0, 0));
    assert_eq!(client.wait_for(0, IMMEDIATELY), None, "each is done once");
    assert_eq!(served.server.status().recovered, 1);
    client.assert_works(0);
}

#[test]
fn what_cannot_be_given_back_is_done_before_the_stop_or_fails() {
    let (served, holds) = serve_held();
    // A VMM without memory for requests in flight.
    let mut client = Client::start(&served.socket, 1, 0);
    offer(&mut client, 0, WRITE);
    offer(&mut client, 1, READ);
    assert_eq!(client.wait(0).0, 3);
    let freed = Arc::clone(&holds);
    let thread = std::thread::spawn(move || {
        std::thread::sleep(IMMEDIATELY);
        freed.store(false, Ordering::Relaxed);
    });
    assert_eq!(stop(&client).0, 2);
    thread.join().unwrap();
    assert_eq!((client.wait(0).0, status(&client, 0)), (0, 0), "it has been done");
    holds.store(true, Ordering::Relaxed);
    client.start_queue(0, 2);
    offer(&mut client, 2, WRITE);
    offer(&mut client, 3, READ);
    assert_eq!(client.wait(0).0, 9);
    let (base, time) = stop(&client);
    assert!(time < Duration::from_secs(20), "{time:?}");
    assert_eq!((base, client.wait(0).0, status(&client, 2)), (4, 6, 1), "it has failed");
}

#[test]
fn a_held_request_continues_after_a_change_of_the_memory() {
    let (served, holds) = serve_held();
    let mut client = Client::start(&served.socket, 1, 0);
    offer(&mut client, 0, WRITE);
    offer(&mut client, 1, READ);
    assert_eq!(client.wait(0).0, 3);
    let begun = Instant::now();
    client.frontend.set_mem_table(&[region(&client.memory, 0, MEMORY)]).unwrap();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(client.wait_for(0, IMMEDIATELY), None, "the write waits again");
    holds.store(false, Ordering::Relaxed);
    assert_eq!((client.wait(0).0, status(&client, 0)), (0, 0));
    client.assert_works(0);
}

#[test]
fn a_new_vmm_does_not_wait_for_what_a_lost_one_has_left_held() {
    let (served, holds) = serve_held();
    let mut first = Client::start(&served.socket, 1, 0);
    offer(&mut first, 0, WRITE);
    offer(&mut first, 1, READ);
    assert_eq!(first.wait(0).0, 3);
    drop(first);
    let begun = Instant::now();
    let mut second = Client::start(&served.socket, 1, 0);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    holds.store(false, Ordering::Relaxed);
    let mut data = [9; 512];
    assert_eq!(second.request(0, WRITE, 0, &mut data), 0);
    std::thread::sleep(IMMEDIATELY);
    assert_eq!(second.request(0, READ, 0, &mut data), 0);
    assert_eq!(data, [9; 512], "an older write has landed");
}
