//! The reference checkpoints, where they are.

use std::path::{Path, PathBuf};

use serde_json::Value;
use snowmelt_weights::Checkpoint;

fn shared() -> Option<PathBuf> {
    let path = std::env::var_os("SNOWMELT_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    path.join("oracle").is_dir().then_some(path)
}

#[test]
fn reference_checkpoints_match_their_layout() {
    let Some(shared) = shared() else {
        println!("skipped: no reference checkpoints, set SNOWMELT_SHARED");
        return;
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(shared.join("oracle")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("model.safetensors").is_file() {
            continue;
        }
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let layout = std::fs::read(folder.join("layout.json")).unwrap();
        let layout: Value = serde_json::from_slice(&layout).unwrap();
        let layout = layout.as_object().unwrap();
        assert_eq!(checkpoint.tensors().count(), layout.len(), "{}", folder.display());
        for (name, entry) in layout {
            let tensor = checkpoint.tensor(name).unwrap();
            let dtype = match tensor.dtype.as_str() {
                "BF16" => "bfloat16",
                "F32" => "float32",
                "I64" => "int64",
                other => panic!("{name}: {other}"),
            };
            assert_eq!(entry[0], dtype, "{name}");
            assert_eq!(entry[1], serde_json::json!(tensor.shape), "{name}");
            let mut bytes = vec![0; tensor.len as usize];
            checkpoint.read(tensor.file, tensor.offset, &mut bytes).unwrap();
            if let Some(encoding) = tensor.encoding {
                let mut row = vec![0.0; tensor.d_in()];
                for bytes in bytes.chunks(tensor.row_bytes().unwrap()) {
                    encoding.decode_row(bytes, &mut row);
                    assert!(row.iter().all(|v| v.is_finite()), "{name}");
                }
            }
        }
        seen += 1;
    }
    assert!(seen > 0, "no checkpoints in {}", shared.display());
    let tiny = shared.join("models/tiny-moe");
    if tiny.is_dir() {
        let checkpoint = Checkpoint::open(&tiny).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            assert!(checkpoint.sidecar(name).unwrap().is_some(), "{name}");
        }
    }
}
