use super::*;
use crate::ask::{Ask, Room};
use crate::client::ThreadLost;
use crate::create::NewImage;
use crate::layout::Shape;
use ringway_core::Op;
use std::time::Instant;

const BYTES: u64 = 1 << 20;

fn image() -> Image {
    let file: File = tempfile::tempfile().unwrap();
    NewImage { virtual_size: BYTES, cluster_bits: 16, backing: None }.write(&file).unwrap();
    let file_bytes = file.metadata().unwrap().len();
    let header = crate::header::Header::read(&file, file_bytes).unwrap().unwrap();
    let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
    let layer = Layer { file: Arc::new(file), file_bytes, format, name: "image".into() };
    let usage = Use { read_only: false, grows: true, barriers: true };
    Image::open(vec![layer], usage).unwrap()
}

/// What becomes of a question.
fn ask(client: &mut ImageClient) -> Result<i64, ThreadLost> {
    let range = ByteRange::new(0, 512).unwrap();
    let memory = std::ptr::null();
    let ask = Ask { tag: 0, op: Op::Read, range, memory, skip: 0, room: Room::Freed };
    // SAFETY: there is no memory.
    unsafe { client.ask(ask) }?;
    let begun = Instant::now();
    loop {
        if let Some(answer) = client.take()? {
            return Ok(answer.result);
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody says anything");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Who is there learns that nobody answers, and so does who comes later; nobody goes on by what the table said.
#[test]
fn c42_nobody_waits_for_a_thread_that_has_panicked() {
    let image = image();
    let mut early = image.client(4).unwrap();
    assert_eq!(ask(&mut early), Ok(0));
    let range = ByteRange::new(0, 512).unwrap();
    assert_eq!(image.place(range, false), Place::Zero { len: 512 });
    assert!(image.in_thread(|_| panic!("on purpose")).is_err());
    assert_eq!(ask(&mut early), Err(ThreadLost));
    let mut late = image.client(4).unwrap();
    assert_eq!(ask(&mut late), Err(ThreadLost));
    assert_eq!(image.place(range, false), Place::Ask { len: 512 });
    let said = image.grow(2 * BYTES).unwrap_err().to_string();
    assert!(said.contains("thread has ended"), "{said}");
    // Nor does the end of the daemon.
    drop((early, late, image));
}
