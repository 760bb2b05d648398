//! Pieces of memory that a request names.

use super::hostile::raw;
use super::*;

/// What means nothing is not handed on, wherever the pieces are.
#[test]
fn bytes_of_a_piece_that_say_nothing_are_forgotten() {
    let mut listed = pieces_to_bytes(&[PIECE]).to_vec();
    listed[6..].fill(0xee);
    let mut pages = Pages(HashMap::from([(1000, listed)]));
    for shape in shapes() {
        let memory = Memory::new(Shape { first: 0, ..shape });
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let with = With::Pages { segments: 1, pages: &[1000] };
        front.push(Ask { command: Command::Read, sector: 8, with }).unwrap();
        front.push(READ).unwrap();
        memory.set_slot(1, &raw(shape.abi, [OP_READ, 1, 0, 0], 8, &[7, 0xeeee_0700]));
        let _ = front.publish();
        for _ in 0..2 {
            let (token, asked) = back.pop(&mut pages).unwrap().unwrap();
            assert_eq!(asked.unwrap().pieces(), [PIECE]);
            back.push(token, Status::Ok);
        }
    }
}
